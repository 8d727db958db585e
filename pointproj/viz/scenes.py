"""Solids and clouds to rotate in a browser, without a connection: trimesh's viewer includes three.js."""

import base64
from pathlib import Path

import numpy as np
from jaxtyping import Float
from manifold3d import Error, Manifold
from manifold3d import Mesh as ManifoldMesh
from trimesh import PointCloud, Scene, Trimesh
from trimesh.viewer import scene_to_html
from trimesh.visual import TextureVisuals
from trimesh.visual.material import PBRMaterial

from pointproj.geometry.files.writing import replacing
from pointproj.geometry.meshes import Mesh
from pointproj.viz.renderings import COLOUR, height_colours, view_axes

DISTANCE = 3.2  # of the camera, in units of the query cube
MATTE = {"metallicFactor": 0.0, "roughnessFactor": 1.0, "doubleSided": True}
TOLERANCE = 4e-3  # largest distance of the displayed surface from the measured one


def write_scene(
    shown: Mesh | Float[np.ndarray, "n 3"], path: Path, colours: Float[np.ndarray, "n 3"] | None = None
) -> None:
    """Write a mesh, or a cloud coloured by height, as a binary glTF file, y up.

    Parameters
    ----------
    shown : Mesh, or float array of shape (n, 3)
        In the query cube, with z up. A closed surface is simplified to fewer faces.
    path : Path
        File to write; an older one is replaced.
    colours : float array, shape (n, 3), optional
        Of the points of a cloud, from 0 to 1.
    """
    scene = Scene()
    if isinstance(shown, Mesh):
        vertices, faces = _simplified(shown)
        if len(faces):
            look = TextureVisuals(material=PBRMaterial(baseColorFactor=[*0.7 * COLOUR, 1.0], **MATTE))
            scene.add_geometry(Trimesh(_y_up(vertices), faces, process=False, visual=look))
    else:
        colours = 220 / 255 * height_colours(shown) if colours is None else colours
        scene.add_geometry(PointCloud(_y_up(shown), colors=np.uint8(255 * colours)))
    place = np.eye(4)
    place[:3, :3] = _y_up(view_axes().T).T
    place[:3, 3] = DISTANCE * place[:3, 2]
    scene.camera_transform = place
    with replacing(path) as temporary:
        temporary.write_bytes(scene.export(file_type="glb", include_normals=False))  # for flat shading


def viewer() -> tuple[str, str]:
    """Return the parts of trimesh's page before and after the scene, which is the base64 text of its file."""
    scene = Scene([PointCloud(np.zeros((1, 3)))])
    page = scene_to_html(scene)
    before, behind = page.split(base64.b64encode(scene.export(file_type="glb")).decode())
    return before, behind


def _y_up(points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "n 3"]:
    return np.stack([points[:, 0], points[:, 2], -points[:, 1]], axis=1)


def _simplified(mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Return vertices and faces, with flat parts of a closed surface simplified to few faces."""
    solid = Manifold(ManifoldMesh(np.float32(mesh.vertices), np.uint32(mesh.faces)))
    if solid.status() != Error.NoError or not len(mesh.faces):
        return mesh.vertices, mesh.faces
    made = solid.simplify(TOLERANCE).to_mesh()
    return made.vert_properties[:, :3], made.tri_verts
