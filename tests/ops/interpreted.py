"""A pytest plugin for runs in Triton's interpreter, which takes a quarter of its time off.

The interpreter replaces the functions of ``triton.language`` anew for each function that a kernel calls, and
puts them back after each kernel. Here they are replaced once for each function, for the rest of the process.
"""

import functools

from triton.runtime import interpreter

if hasattr(interpreter, "_LangPatchScope"):  # else they are never put back
    interpreter._LangPatchScope.restore = lambda scope: None
    interpreter._patch_lang = functools.cache(interpreter._patch_lang)
