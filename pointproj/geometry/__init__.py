"""Meshes and solids: files, sampling, fields, isosurfaces, metrics."""
