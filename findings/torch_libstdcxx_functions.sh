#!/usr/bin/env bash
# An extension that is linked with -ltorch as torch's stable ABI wants it, by g++ 11 or newer, which adds -lstdc++ at the end.
# Expected: functions of the C++ library come from libstdc++.so.6, with its versions (GLIBCXX_...).
# Seen: libtorch.so of the wheel of torch 2.10.0 exports some of them without a version, and the linker takes those. Such a
# library names functions that neither libstdc++ of that version nor another torch need export. With -lstdc++ first, all are right.
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m pip download -q --no-deps --only-binary :all: -d . torch==2.10.0
python3 - <<'PYTHON'
import glob
import zipfile

with zipfile.ZipFile(glob.glob("*.whl")[0]) as wheel:
    wheel.extract("torch/lib/libtorch.so")
PYTHON
cat > text.cpp <<'CPP'
#include <sstream>
std::string text(int number) { std::ostringstream out; out << number; return out.str(); }
CPP
g++ -std=c++20 -O0 -fPIC -c text.cpp
without_version() {
    g++ -shared -Wl,--no-as-needed,--allow-shlib-undefined text.o -Ltorch/lib "$@" -o text.so
    nm -D --undefined-only text.so | grep -c '_ZN\w*ostringstream[^@]*$' || true
}
torch_first=$(without_version -ltorch)
libstdcxx_first=$(without_version -lstdc++ -ltorch)
echo "torch 2.10.0: functions of libstdc++ without a version: seen $torch_first, expected $libstdcxx_first, as with -lstdc++ first"
[ "$torch_first" -gt 0 ] && [ "$libstdcxx_first" -eq 0 ]
