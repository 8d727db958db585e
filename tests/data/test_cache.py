"""The cache: equal keys give equal arrays, whatever happened to the bytes in between."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pointproj.data.cache import Cache, entry_key
from pointproj.runtime.run_folder import RunError

ARRAYS = {
    "vertices": np.arange(12, dtype=np.float64).reshape(4, 3),
    "faces": np.array([[0, 1, 2]], dtype=np.int32),
    "reason": np.array("enclosed nothing: ∅"),
}
SETTINGS = {"grid": 30, "target": "udf"}


def assert_stored(loaded):
    assert loaded.keys() == ARRAYS.keys()
    for name, array in ARRAYS.items():
        assert loaded[name].dtype == array.dtype
        assert np.array_equal(loaded[name], array)


def test_arrays_come_back_and_numpy_reads_the_file(tmp_path):
    cache = Cache(tmp_path / "not" / "yet")
    key = entry_key("ab", SETTINGS)
    assert cache.load(key) is None
    cache.store(key, ARRAYS)
    assert_stored(cache.load(key))
    assert_stored(dict(np.load(cache.path(key))))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [cache.path(key)]


def test_keys_depend_on_content_and_every_setting():
    keys = {
        entry_key(content, settings)
        for content in ("ab", "ac")
        for settings in (
            SETTINGS,
            SETTINGS | {"grid": 31},
            SETTINGS | {"grid": "30"},
            SETTINGS | {"target": "sdf"},
            SETTINGS | {"code": "1"},
        )
    }
    assert len(keys) == 10
    assert entry_key("ab", {"target": "udf", "grid": 30}) == entry_key("ab", SETTINGS)


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_damage_is_noticed_and_repaired(tmp_path_factory, data):
    cache = Cache(tmp_path_factory.mktemp("cache"))
    key = entry_key("ab", SETTINGS)
    cache.store(key, ARRAYS)
    sound = cache.path(key).read_bytes()
    place = data.draw(st.integers(0, len(sound) - 1))
    damage = data.draw(
        st.one_of(
            st.integers(1, 255).map(
                lambda bits: sound[:place] + bytes([sound[place] ^ bits]) + sound[place + 1 :]
            ),
            st.just(sound[:place]),
            st.binary(min_size=1, max_size=200).map(lambda more: sound + more),
            st.binary(max_size=200),
        )
    )
    cache.path(key).write_bytes(damage)
    assert cache.load(key) is None
    cache.store(key, ARRAYS)
    assert cache.path(key).read_bytes() == sound
    assert_stored(cache.load(key))


@pytest.mark.parametrize(("owner", "call"), [(os, "replace"), (Path, "write_bytes")])
def test_a_full_disk_is_told_with_the_file_and_leaves_the_old_entry_and_no_litter(
    owner, call, tmp_path, monkeypatch
):
    def full_disk(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    cache, key = Cache(tmp_path), entry_key("ab", SETTINGS)
    cache.store(key, ARRAYS)
    monkeypatch.setattr(owner, call, full_disk)
    words = rf"{cache.path(key)} cannot be written \(No space left on device\).*data\.cache=FOLDER"
    with pytest.raises(RunError, match=words):
        cache.store(key, {"vertices": np.zeros(3)})
    assert_stored(cache.load(key))
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [cache.path(key)]
