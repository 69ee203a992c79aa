# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Specs of kernel arguments as text, for command lines: ``paged(bf16, num_heads=8, head_size=128, page_size=16)``.

The text uses Python's syntax of calls, names and numbers, and is not evaluated:

    bf16                                  a scalar of a dtype
    none                                  an optional argument that is absent
    buffer(i32, 2)                        kv.Buffer[kv.i32, 2]
    paged(…) continuous(…) fa3(…)         a cache; the keywords are those of CacheSpec, strides=(128, 2048) too
    collection(paged(…))                  a collection of such caches
    operand(paged(…))                     an attention operand over one
    scales(…) dense(…) ragged(…)          an attention operand over a paged cache's scales, or over a buffer
    tma_tiled(paged(…), rows=64)          a TMA descriptor of a cache or operand; also tma_ragged, tma_rope,
                                          tma_gather4, tma_rope_gather4. The keywords are those of the functions of
                                          kvarn.dialect.tma_layout, the swizzle in bytes (16 is none)
"""

from __future__ import annotations

import ast
import inspect
from typing import Any, NamedTuple

from kvarn.dialect import dtypes, layout, page_orders, tma_layout
from kvarn.errors import meant

_CACHES = {"paged": layout.PAGED, "continuous": layout.CONTINUOUS, "fa3": layout.FA3}
_KEYWORDS = ("num_heads", "head_size", "page_size", "is_mla", "scale_dtype", "granularity", "strides", "zero")
_OPERANDS = {"scales": layout.SCALES, "dense": layout.DENSE, "ragged": layout.RAGGED}
_WRAPPERS = {"collection": layout.CollectionSpec, "operand": layout.OperandSpec}
_DESCRIPTORS = {
    f"tma_{f.__name__}": f
    for f in (tma_layout.tiled, tma_layout.ragged, tma_layout.rope, tma_layout.gather4, tma_layout.rope_gather4)
}
_SWIZZLES = {bytes_: name for name, bytes_ in tma_layout.SWIZZLE_BYTES.items()}
_FORMS = (
    "a dtype, buffer(dtype, rank), paged(…), continuous(…), fa3(…), collection(…), operand(…), scales(…), dense(…), "
    "ragged(…) or tma_tiled(…)"
)


class Shaped(NamedTuple):
    """A buffer of a dtype and extents; None for a dynamic extent."""

    dtype: dtypes.DType
    extents: tuple[int | None, ...]


def parse_operand(text: str) -> Any:
    """Like :func:`parse_spec`, but a buffer has extents, ``buffer(bf16, (none, 32, 128))``, and becomes a Shaped."""
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        return parse_spec(text)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.func.id != "buffer":
        return parse_spec(text)
    extents = _value(node.args[1]) if len(node.args) == 2 else ()
    if not isinstance(extents, tuple) or not extents or not all(e is None or isinstance(e, int) for e in extents):
        raise ValueError(f"a buffer must have a dtype and its extents, buffer(bf16, (none, 32, 128)), got {text!r}")
    return Shaped(_value(node.args[0]), extents)


def parse_value(text: str) -> Any:
    """A Python literal; any other text is a string."""
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text.strip()


def parse_spec(text: str) -> Any:
    """The spec in a text: a DType, BufferSpec, CacheSpec, CollectionSpec, OperandSpec or None.

    Raises
    ------
    ValueError
        If it is not a spec; the message quotes it and lists the forms.
    """
    try:
        node = ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError):
        raise ValueError(f"a spec must be {_FORMS}, got {text!r}") from None
    try:
        return _spec(node)
    except (TypeError, ValueError) as e:
        raise ValueError(f"{e} in spec {text!r}") from None


def _spec(node: ast.expr) -> Any:
    if isinstance(node, ast.Name):
        return None if node.id == "none" else dtypes.by_name(node.id)
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        raise ValueError(f"a spec must be {_FORMS}")
    name = node.func.id
    keywords: dict[str, Any] = {}
    for keyword in node.keywords:
        if keyword.arg is None:
            raise ValueError("a spec takes no ** argument")
        keywords[keyword.arg] = _value(keyword.value)
    if name in _CACHES or name in _OPERANDS or name in page_orders.added:
        if len(node.args) != 1:
            raise ValueError(f"{name} must have its dtype first and then keywords")
        for keyword in keywords:
            if keyword not in _KEYWORDS:
                raise ValueError(f"{name} takes {', '.join(_KEYWORDS)}, got {keyword!r}{meant(keyword, _KEYWORDS)}")
        try:
            found = layout.spec_of({**_CACHES, **_OPERANDS}.get(name, name), _value(node.args[0]), **keywords)
            return layout.OperandSpec(found) if name in _OPERANDS else found
        except TypeError as e:
            raise ValueError(f"{name} takes {', '.join(_KEYWORDS)}: {str(e).partition(') ')[2] or e}") from None
    if name in _DESCRIPTORS:
        return _descriptor(name, node.args, keywords)
    if keywords:
        raise ValueError(f"{name} takes no keywords")
    if name in _WRAPPERS:
        inner = _spec(node.args[0]) if len(node.args) == 1 else None
        if not isinstance(inner, layout.CacheSpec):
            raise ValueError(f"{name} must have one cache: paged(…), continuous(…) or fa3(…)")
        return _WRAPPERS[name](inner)
    if name == "buffer":
        if len(node.args) != 2:
            raise ValueError("buffer must have a dtype and a rank")
        from kvarn.dsl.memory import BufferSpec

        return BufferSpec(_value(node.args[0]), _value(node.args[1]))
    raise ValueError(f"a spec must be {_FORMS}, got {name}(…)")


def _descriptor(name: str, args: list[ast.expr], keywords: dict[str, Any]) -> tma_layout.TmaSpec:
    of = _spec(args[0]) if len(args) == 1 else None
    of = of.cache if isinstance(of, layout.OperandSpec) else of
    if not isinstance(of, layout.CacheSpec):
        raise ValueError(f"{name} must have a cache or an operand first and then keywords")
    if "swizzle" in keywords:
        if keywords["swizzle"] not in _SWIZZLES:
            raise ValueError(f"swizzle must be one of {', '.join(map(str, _SWIZZLES))}, got {keywords['swizzle']}")
        keywords["swizzle"] = _SWIZZLES[keywords["swizzle"]]
    make = _DESCRIPTORS[name]
    known = list(inspect.signature(make).parameters)[1:]
    if not set(keywords) <= set(known):
        raise ValueError(f"{name} takes {', '.join(known)}, got {', '.join(sorted(set(keywords) - set(known)))}")
    return make(of, **keywords)


def _value(node: ast.expr) -> Any:
    """A dtype, a number, a truth value, none or a tuple of them."""
    if isinstance(node, ast.Tuple):
        return tuple(_value(element) for element in node.elts)
    if isinstance(node, ast.Name):
        words: dict[str, Any] = {"true": True, "false": False, "none": None}
        return words[node.id] if node.id in words else dtypes.element_by_name(node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, bool)):
        return node.value
    raise ValueError(f"a value must be a dtype, a whole number, true or false, got {ast.unparse(node)}")
