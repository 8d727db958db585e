"""Torch operators from functions, from Warp launches and from C++."""
