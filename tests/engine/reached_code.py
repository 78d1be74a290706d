"""Which code a call runs: lines of labkit, and functions that mlx_lm's architectures share."""

import os
import sys
import threading

import mlx.core as mx
import mlx_lm.models

import labkit

LABKIT = os.path.dirname(labkit.__file__) + os.sep
MODELS = os.path.dirname(mlx_lm.models.__file__) + os.sep


def reached(call, models):
    """Run ``call``; return the places that it ran.

    A place is a file, a function and a line of labkit, or a file and a function in
    ``mlx_lm.models``, but for the files of ``models``: each architecture has one of its own.
    """
    own, places = {f"{name}.py" for name in models}, set()

    def line(frame, event, _):
        if event == "line":
            code = frame.f_code
            places.add((code.co_filename[len(LABKIT) :], code.co_qualname, frame.f_lineno))
        return line

    def function(frame, _event, _):
        code = frame.f_code
        if code.co_filename.startswith(LABKIT) and code.co_name != "<module>":
            return line
        file = code.co_filename.removeprefix(MODELS)
        if file not in (code.co_filename, *own):
            places.add((file, code.co_qualname))
        return None

    before = sys.gettrace()
    mx.disable_compile()  # Python runs once for a compiled function, whoever calls it first
    sys.settrace(function)
    threading.settrace(function)
    try:
        call()
    finally:
        sys.settrace(before)
        threading.settrace(before)
        mx.enable_compile()
    return places


def cover(places):
    """Return few names that together have all places; each next one adds the most."""
    left, chosen = set().union(*places.values()), []
    while left:
        chosen.append(max(places, key=lambda name: len(places[name] & left)))
        left -= places[chosen[-1]]
    return sorted(chosen)
