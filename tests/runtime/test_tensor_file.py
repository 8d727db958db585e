"""Files of tensors: written whole or not at all; from strangers, refused before they cost anything."""

import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save as tensor_bytes

from pointproj.runtime import tensor_file
from pointproj.runtime.tensor_file import DamagedFile

CONTENT = {"weight": torch.arange(12.0).reshape(3, 4), "losses": [[1, 0.5], [2, 0.25]], "best": float("inf")}


@pytest.fixture
def path(tmp_path):
    tensor_file.save(tmp_path / "last.pt", CONTENT)
    return tmp_path / "last.pt"


class Calls:
    """Pickles as a call of a function."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def test_every_kind_of_value_comes_back(tmp_path):
    shared = torch.arange(6.0)
    content = {
        "values": [None, True, 3, -0.5, "text", {"nested": [1, [2]]}],
        "tensors": [torch.tensor(2, dtype=torch.int64), torch.empty(0, 3), torch.tensor([True, False])],
        "half": torch.ones(2, dtype=torch.bfloat16),
        "state": {0: {"step": torch.tensor(5.0)}},
        "views": {"whole": shared, "part": shared[1:4], "turned": shared.reshape(2, 3).T},
    }
    tensor_file.save(tmp_path / "a.pt", content)
    read = tensor_file.load(tmp_path / "a.pt")
    assert read["values"] == content["values"]
    for found, told in zip(read["tensors"], content["tensors"], strict=True):
        assert found.dtype == told.dtype
        assert torch.equal(found, told)
    assert torch.equal(read["half"], content["half"])
    assert read["state"]["0"]["step"] == 5
    assert all(torch.equal(read["views"][name], tensor) for name, tensor in content["views"].items())


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
    with pytest.raises(DamagedFile, match="not a complete file"):
        tensor_file.load(path)


@pytest.mark.parametrize(
    "told", [CONTENT["weight"].numpy().tobytes(), b"0.25"], ids=["a tensor", "a plain number"]
)
def test_an_altered_number_is_noticed(path, told):
    content = bytearray(path.read_bytes())
    content[content.index(told) + 3] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match="was altered"):
        tensor_file.load(path)


@pytest.mark.parametrize("write", [pickle.dump, torch.save], ids=["pickle", "torch"])
def test_no_code_of_a_file_is_run(path, write, monkeypatch):
    monkeypatch.chdir(path.parent)
    with path.open("wb") as file:
        write({"weight": Calls(os.system, "touch executed")}, file)
    with pytest.raises(DamagedFile, match=r"not a complete file|torch\.save wrote it"):
        tensor_file.load(path)
    assert os.listdir(path.parent) == ["last.pt"]


@pytest.mark.parametrize(
    ("told", "lie"),
    [
        (b'"data_offsets":[0,48]', b'"data_offsets":[0,99]'),
        (b'"shape":[3,4]', b'"shape":[9,9]'),
        (b'"dtype":"F32"', b'"dtype":"F64"'),
    ],
)
def test_no_more_is_read_than_the_file_has(path, told, lie):
    content = path.read_bytes()
    assert told in content
    path.write_bytes(content.replace(told, lie))
    with pytest.raises(DamagedFile, match="not a complete file"):
        tensor_file.load(path)


def with_text(path, text):
    """Write a file whose plain values are ``text``, with a check sum that is right."""
    tensors = {"/weight": CONTENT["weight"]}
    told = {"content": text, "crc32": str(tensor_file._check_sum(text, tensors))}
    path.write_bytes(tensor_bytes(tensors, told))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("[" * 100_000, "RecursionError"),
        ("9" * 5000, "ValueError"),
        (json.dumps({"weight": {"$tensor": "/bias"}}), "KeyError"),
        (json.dumps([1, 2]), "expected a mapping, got list"),
        ("{", "JSONDecodeError"),
    ],
)
def test_plain_values_that_make_no_sense_are_refused(path, text, reason):
    with_text(path, text)
    with pytest.raises(DamagedFile, match=reason):
        tensor_file.load(path)


def test_tensors_of_another_program_are_refused(path):
    path.write_bytes(tensor_bytes({"weight": torch.zeros(3)}))
    with pytest.raises(DamagedFile, match="crc32"):
        tensor_file.load(path)


def test_what_is_no_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(DamagedFile, match="expected a file"):
        tensor_file.load(tmp_path / "pipe.pt")
