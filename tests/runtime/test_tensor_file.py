"""Files of tensors: written whole or not at all; from strangers, refused before they cost anything."""

import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections import OrderedDict

import pytest
import torch

from pointproj.runtime import memory, tensor_file
from pointproj.runtime.tensor_file import DamagedFile

CONTENT = {"weight": torch.arange(12.0).reshape(3, 4), "losses": [[1, 0.5], [2, 0.25]], "best": float("inf")}


@pytest.fixture
def path(tmp_path):
    tensor_file.save(tmp_path / "last.pt", CONTENT)
    return tmp_path / "last.pt"


def rewritten(path, change=lambda name, content: content, compression=zipfile.ZIP_STORED):
    """Write the archive anew, each part as ``change(name, content)`` has it."""
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in parts.items():
            archive.writestr(name, change(name, content))


def with_pickle(path, pickled):
    rewritten(path, lambda name, content: pickled if name.endswith("data.pkl") else content)


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_content_comes_back_and_stays_when_the_file_goes(path):
    content = tensor_file.load(path)
    path.write_bytes(bytes(path.stat().st_size))
    assert torch.equal(content["weight"], CONTENT["weight"])
    assert content["losses"] == [[1, 0.5], [2, 0.25]]


def test_what_is_replaced_is_kept_where_asked(path):
    other = path.with_name("previous.pt")
    for number in range(3):
        tensor_file.save(path, {"number": number}, keep=other)
    assert (tensor_file.load(path)["number"], tensor_file.load(other)["number"]) == (2, 1)
    assert sorted(os.listdir(path.parent)) == ["last.pt", "previous.pt"]


def test_without_links_a_copy_is_kept(path, monkeypatch):
    def no_links(*arguments):
        raise OSError("not supported here")

    monkeypatch.setattr(os, "link", no_links)
    tensor_file.save(path, {"number": 1}, keep=path.with_name("previous.pt"))
    assert "weight" in tensor_file.load(path.with_name("previous.pt"))


@pytest.mark.parametrize("step", ["fsync", "link", "replace 1", "replace 2"])
def test_one_of_the_two_files_is_whole_at_every_moment(path, monkeypatch, step):
    """A kill is a return from none of the calls after it: here each call in turn is the last that happens."""
    other = path.with_name("previous.pt")
    name, _, number = step.partition(" ")
    plain, calls = getattr(os, name), []

    class Killed(BaseException):
        pass

    def killed(*arguments):
        calls.append(arguments)
        if len(calls) == int(number or 1):
            raise Killed
        return plain(*arguments)

    monkeypatch.setattr(os, name, killed)
    with pytest.raises(Killed):
        tensor_file.save(path, {"number": 1}, keep=other)
    assert tensor_file.load(path).keys() in ({"number"}, CONTENT.keys())
    assert not other.exists() or "weight" in tensor_file.load(other)


def test_a_full_disk_is_an_os_error_and_leaves_the_old_file(tmp_path):
    """A real failing write: the process may make no larger file than its first one."""
    code = f"""
import resource, sys, torch
from pathlib import Path
from pointproj.runtime import tensor_file
path = Path({str(tmp_path / "last.pt")!r})
tensor_file.save(path, {{"number": 1}})
resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
try:
    tensor_file.save(path, {{"weight": torch.zeros(10_000)}})
except OSError as error:
    print(error.strerror, tensor_file.load(path))
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "File too large {'number': 1}\n"
    assert os.listdir(tmp_path) == ["last.pt"]


@pytest.mark.parametrize("share", [0, 0.2, 0.5, 0.9, 0.999])
def test_a_file_cut_short_is_refused(path, share):
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DamagedFile, match="no whole archive"):
        tensor_file.load(path)


def test_an_altered_number_is_noticed(path):
    content = bytearray(path.read_bytes())
    content[content.index(CONTENT["weight"].numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match=r"data/0 was altered"):
        tensor_file.load(path)


def test_compressed_archives_are_refused_before_they_unfold(path):
    rewritten(
        path, lambda name, content: bytes(10**8) if name.endswith("data/0") else content, zipfile.ZIP_DEFLATED
    )
    with pytest.raises(DamagedFile, match="without compression"):
        tensor_file.load(path)


CALLS = {
    "code": (Calls(os.system, "touch executed"), "posix system"),
    "an allocation": (Calls(bytearray, 10**12), "builtin__ bytearray"),
    "a tensor of any size": (Calls(torch.FloatTensor, 10**12), "torch FloatTensor"),
    "a set": ({1, 2}, "set"),
}


@pytest.mark.parametrize(("value", "name"), CALLS.values(), ids=CALLS.keys())
def test_calls_that_tensors_do_not_need_are_not_made(path, value, name, monkeypatch):
    monkeypatch.chdir(path.parent)
    with_pickle(path, pickle.dumps({"value": value}, protocol=2))
    with pytest.raises(DamagedFile, match=name):
        tensor_file.load(path)
    assert os.listdir(path.parent) == ["last.pt"]


def pickled(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("archive/data.pkl")


@pytest.mark.parametrize(
    ("told", "lie"),
    [
        (b"K\x0ctq", b"J\x00\x00\x00\x10tq"),  # 2**28 numbers for the 12 of the storage
        (b"K\x03K\x04\x86", b"M\xff\xffM\xff\xff\x86"),  # 65535 rows and columns of the tensor
    ],
    ids=["storage", "tensor"],
)
def test_no_more_is_read_than_the_file_has(path, told, lie):
    pickle_before = pickled(path)
    assert told in pickle_before
    with_pickle(path, pickle_before.replace(told, lie))
    try:
        content = tensor_file.load(path)
    except DamagedFile:
        return
    assert content["weight"].untyped_storage().nbytes() == 48


def nested(levels, width=1):
    tree = []
    for _ in range(levels):
        tree = [tree] * width
    return tree


@pytest.mark.parametrize("tree", [nested(40), nested(15, 10)], ids=["deep", "unfolding"])
def test_trees_without_end_are_refused(path, tree, monkeypatch):
    monkeypatch.setattr(tensor_file, "_MAX_VALUES", 40_000)
    with_pickle(path, pickle.dumps({"tree": tree}, protocol=2))
    with pytest.raises(DamagedFile, match="more than"):
        tensor_file.load(path)


def test_a_cycle_is_refused(path):
    cycle = {}
    cycle["self"] = cycle
    with_pickle(path, pickle.dumps(cycle, protocol=2))
    with pytest.raises(DamagedFile, match="levels"):
        tensor_file.load(path)


def test_tensors_that_share_numbers_do_not_multiply(tmp_path):
    weight = torch.zeros(100_000)
    buffer = io.BytesIO()
    torch.save(OrderedDict((str(number), weight[:]) for number in range(1000)), buffer)
    (tmp_path / "shared.pt").write_bytes(buffer.getvalue())
    memory.reset_peak("cpu")
    before = memory.peak_bytes("cpu")
    with pytest.raises(DamagedFile, match="more elements"):
        tensor_file.load(tmp_path / "shared.pt")
    assert memory.peak_bytes("cpu") - before < 50_000 * 1024  # of 400,000


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(DamagedFile, match="expected a file"):
        tensor_file.load(tmp_path / "pipe.pt")
