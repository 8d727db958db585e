"""Warp starts without its warning that there is no GPU."""

import os

from pointproj.geometry import warp_meshes


def test_only_the_warning_about_the_driver_is_left_out(monkeypatch, capfd):
    def init():
        os.write(
            2, b"Warp CUDA warning: Could not find or load the NVIDIA CUDA driver. No GPU.\nanother line\n"
        )

    monkeypatch.setattr(warp_meshes.wp, "init", init)
    warp_meshes._initialize.__wrapped__()
    assert capfd.readouterr().err == "another line\n"
