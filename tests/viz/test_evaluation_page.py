"""The page of an evaluation: one file, the worst mesh first, views that turn in a browser."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import trimesh
from matplotlib.image import imread, imsave

from pointproj.geometry.meshes import Mesh
from pointproj.geometry.metrics import METRICS, Measured
from pointproj.viz.evaluation_page import COLUMNS, write_page
from pointproj.viz.scenes import write_scene

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# Drags the second view, and says in the title where the cameras of all are.
TURN = """<script>
const waiting = setInterval(() => {
  if (!frames.every(frame => frame.contentWindow && frame.contentWindow.camera)) return
  clearInterval(waiting)
  leader = frames[1]
  leader.contentWindow.camera.position.set(0, 3.2, 0.1)
  setTimeout(() => {
    document.title = JSON.stringify(frames.map(frame => frame.contentWindow.camera.position.toArray()))
  }, 1500)
}, 500)
</script>"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """Of two boxes, whose pictures are white."""
    box = trimesh.creation.box((1.8, 1.2, 0.6))
    solid = Mesh(box.vertices, box.faces, "box")
    results = []
    for name, iou in (("good", 0.9), ("bad", 0.4)):
        for title in ("network", "label", "file"):
            write_scene(solid, tmp_path / "views" / name / f"{title}.glb")
        write_scene(solid.vertices, tmp_path / "views" / name / "cloud.glb")
        (tmp_path / "pictures").mkdir(exist_ok=True)
        imsave(tmp_path / "pictures" / f"{name}.png", np.ones((9, 9, 3)))
        values = dict.fromkeys(METRICS, 0.5) | {"iou": iou}
        results.append(Measured(name, "table<td>", "even", 8, "network", 0.3, values, 1.0))
    write_page(tmp_path / "index.html", results, {"side": 24})
    return tmp_path / "index.html"


def test_the_page_holds_all_that_it_shows_the_worst_first(page: Path):
    text = page.read_text(encoding="utf-8")
    assert re.findall("<h2>(.*)</h2>", text) == ["bad", "good"]
    assert "<td>table&lt;td&gt;</td>" in text
    assert "network: IoU 0.400" in text
    assert "not well posed" in text
    assert all(f"<dt>{heading}</dt><dd>" in text for heading in COLUMNS)
    assert set(re.findall('(?:src|href)="([a-z]+:[a-z]+)', text)) == {"data:image"}


def _browse(page: Path, *arguments: str) -> str:
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--use-angle=swiftshader"]
    command += ["--enable-unsafe-swiftshader", "--host-resolver-rules=MAP * ~NOTFOUND"]
    command += ["--window-size=1400,2000", "--virtual-time-budget=30000"]
    command += [f"--user-data-dir={page.parent / 'browser'}", *arguments, page.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: apt-get install chromium")
@pytest.mark.slow
def test_views_are_drawn_and_turn_together_in_a_browser(page: Path):
    _browse(page, f"--screenshot={page.parent / 'shot.png'}")
    red, _, blue = np.moveaxis(imread(page.parent / "shot.png")[..., :3], 2, 0)
    assert (blue - red > 0.1).sum() > 20_000  # of three boxes; the histogram's line is thin
    page.write_text(page.read_text(encoding="utf-8") + TURN, encoding="utf-8")
    places = np.array(json.loads(re.search("<title>(.*)</title>", _browse(page, "--dump-dom"))[1]))
    assert len(places) == 4
    assert np.allclose(places, [0, 3.2, 0.1], atol=0.05)
