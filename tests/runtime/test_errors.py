"""What users see of errors and results, whatever their terminal can show."""

import io
import sys

from pointproj.runtime.errors import print_any_text


def test_letters_that_the_encoding_lacks_are_printed_as_numbers(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    print_any_text()
    print("é: 3³", flush=True)
    assert written.getvalue() == b"\\xe9: 3\\xb3\n"
