"""Hypothesis strategies of sound values and of bent ones: a part of a sound value is anything."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import (
    Annotated,
    Any,
    NotRequired,
    Union,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from hypothesis import strategies as st

#: What hardly fits anywhere.
NASTY: tuple[Any, ...] = (
    None, True, 0, -1, 7, 2**31, 2**63, 10**30, 10**400, -0.0, 0.5, -2.5, 1e-300, 1e300,
    float("nan"), float("inf"), float("-inf"), "", " ", "-1", "auto", "nan", "..",
    "../../etc/passwd", "/dev/zero/x", "a\nb", "\x00", "\x7f\x1b[31m", "\ud7ff\uffff",
    "'; touch pwned; '", "$(touch pwned)", "`touch pwned`", "<script>alert(1)</script>", "{rank}",
    "%s%n", "x" * 5000, "int8", "cuda", "adam", "__import__('os').system('touch pwned')",
    [], [None], [-1, 1], ["a"], [[1]], [1] * 300, {}, {"": 1}, {"a": {"b": {}}}, {"count": 10**9},
)  # fmt: skip
#: Anything that a file of JSON or TOML can say.
VALUES = st.sampled_from(NASTY).map(copy.deepcopy) | st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=8), parts, max_size=3)
    ),
    max_leaves=6,
)


def of_shape(shape: Any) -> st.SearchStrategy[Any]:
    """Return a strategy of the values of JSON that `has_shape` finds to have a shape."""
    origin, parts = get_origin(shape), get_args(shape)
    if shape is Any:
        return VALUES
    if is_typeddict(shape):
        every = {n: of_shape(s) for n, s in get_type_hints(shape, include_extras=True).items()}
        needed = {name: every.pop(name) for name in shape.__required_keys__}
        return st.fixed_dictionaries(needed, optional=every)
    if origin is Annotated:
        return st.sampled_from(parts[1][:9]) | st.sampled_from(parts[1])
    if origin is NotRequired:
        return of_shape(parts[0])
    if origin in (Union, UnionType):
        return st.one_of(*map(of_shape, parts))
    if origin is tuple:
        return st.tuples(*map(of_shape, parts)).map(list)
    if origin is list:
        return st.lists(of_shape(parts[0]), max_size=4)
    if origin is dict:
        return st.dictionaries(st.text(max_size=8), of_shape(parts[1]), max_size=3)
    plain: Any = {
        str: st.text(max_size=12) | st.sampled_from(("-m", "python", "train.py", "optimizer")),
        float: st.floats(),
        int: st.integers(),
        bool: st.booleans(),
        type(None): st.none(),
    }
    return plain[shape]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every part of nested lists and tables."""
    inner: Any = ()
    if isinstance(value, Mapping):
        inner = value.items()
    elif isinstance(value, list | tuple):
        inner = list(enumerate(value))[:4]
    for key, part in inner:
        yield (*path, key)
        yield from places(part, (*path, key))


@st.composite
def bent(draw: Any, sound: Any) -> Any:
    """Draw a copy of a value with one to three parts replaced, taken away, added or doubled.

    `sound` is a value of JSON, or a strategy of them.
    """
    value = copy.deepcopy(draw(sound) if isinstance(sound, st.SearchStrategy) else sound)
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        paths = list(places(value))
        if not paths:
            return draw(VALUES)
        *path, last = draw(st.sampled_from(paths))
        holder = value
        for step in path:
            holder = holder[step]
        holder = holder if isinstance(holder, dict | list) else [*holder]
        how = draw(st.sampled_from(("gone", "more", "scaled", *["replaced"] * 7)))
        if how == "gone":
            del holder[last]
        elif how == "more" and isinstance(holder, dict):
            holder[draw(st.sampled_from(("steps", "kind", "zzz", "", "schema")))] = draw(VALUES)
        elif how == "scaled" and type(holder[last]) in (int, float) and abs(holder[last]) < 1e300:
            holder[last] *= draw(st.sampled_from((-1, 0, 1000, 1e-9)))
        else:
            holder[last] = [holder[last]] if how == "scaled" else draw(VALUES)
    return value
