# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""Conversions of caches: to a storage type (saturating), and to and from quantized values."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvarn.dialect import codes, dtypes
from kvarn.dialect.dtypes import CODED, DType
from kvarn.dialect.records import MOST_VALUE, Record, problems


def saturating_cast(values: Any, dtype: DType) -> np.ndarray:
    """Convert to a storage type, like kernels.

    Parameters
    ----------
    values : array-like
        Numbers of any dtype and shape.
    dtype : DType
        Target. An 8-bit float: round to nearest even, and saturate to the largest finite value, infinities too; NaN
        stays NaN. An integer: round to nearest even and saturate; NaN becomes 0. A wider float: round.

    Returns
    -------
    numpy.ndarray
        Of ``dtype.numpy``.
    """
    array = np.asarray(values)
    if array.dtype == dtype.numpy:
        return array
    if dtype.is_integer:
        wide = array.astype(np.float64)
        info = np.iinfo(dtype.numpy)
        return np.clip(np.rint(np.where(np.isnan(wide), 0.0, wide)), info.min, info.max).astype(dtype.numpy)
    if array.dtype.kind not in "fiu" or array.dtype.itemsize < 4:
        array = array.astype(np.float32)  # the small floats of ml_dtypes are exact in f32
    if dtype.bits == 8:
        array = np.clip(array, -dtype.largest, dtype.largest)
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype.numpy)


def dequantize(stored: np.ndarray, scale: np.ndarray, dtype: DType, zero: np.ndarray | None = None) -> np.ndarray:
    """``(stored + zero) * scale``, computed in f32 for every scale type, rounded once to ``dtype``.

    The sum is exact, since elements with zeros have 4 bits.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = stored.astype(np.float32)
        found = found if zero is None else found + zero.astype(np.float32)
        return saturating_cast(found * scale.astype(np.float32), dtype)


def default_load_dtype(storage: DType, quantized: bool) -> DType:
    """The default result type of a load: the storage type, or f32 for a quantized cache."""
    return dtypes.f32 if quantized else storage


# --- records ---------------------------------------------------------------------------------------


def encode(record: Record, values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Quantize heads to a record with scales, as ``append`` does.

    The scale of a group is its largest magnitude over the largest magnitude of an element, rounded to the type of the
    scales (upwards to f8e8m0); a scale of zero becomes one, or stays, if the record keeps zero scales. Elements are the
    values over the scale, rounded to nearest: ties to even, of a codebook to the greater number.

    With zeros, a group's scale is a fifteenth of the distance from its least value to its greatest, but at least 2^-15
    of the least one's magnitude, rounded to the type of the scales; both are at most 2^15 in magnitude. A scale of zero
    becomes one. Its zero is the least value over the scale, rounded. Elements are values over the scale less the zero,
    rounded to even. All divisions are products with the inverse of the scale as f32.

    Parameters
    ----------
    record : Record
        With scales.
    values : array-like [..., D]

    Returns
    -------
    tuple of numpy.ndarray
        Elements [..., D], or bytes of two, uint8 [..., D / 2]; scales [..., groups], each followed by its zero, if any.
    """
    x = np.asarray(values).astype(np.float32)
    shape, of_scale = x.shape, record.scale
    if of_scale is None:
        raise ValueError(f"encode needs a record with scales, got {record}")
    for problem in problems(record.elements, of_scale, record.group, record.zero, record.rotation, shape[-1]):
        raise ValueError(problem)
    x = grouped(rotated(x, record.rotation), record.group)
    if record.zero:
        elements, scales = _with_zeros(record, x)
    else:
        scales = rounded_scale(record, np.abs(x).max(-1) / np.float32(record.elements.largest))
        divisor = scales.astype(np.float32)[..., None]
        x = x / np.where(divisor == 0, np.float32(1), divisor)
        elements = x if record.elements.code else rounded(x, record.elements)
    count = record.groups(shape[-1])
    elements = elements.reshape(*shape[:-1], count * record.group)[..., : shape[-1]]
    if record.packed:
        elements = coded(elements, record.elements) if record.elements.code else packed(elements)
    return elements, scales.reshape(*shape[:-1], count * record.group_scales)


def _with_zeros(record: Record, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The elements [..., groups, group] of a record with zeros, and (scale, zero) per group."""
    of_scale = record.scale
    assert of_scale is not None
    last, f32 = np.float32(record.elements.largest), np.float32
    least, greatest = (np.clip(x, f32(-MOST_VALUE), f32(MOST_VALUE)) for x in (x.min(-1), x.max(-1)))
    with np.errstate(under="ignore", over="ignore"):
        scale = np.maximum((greatest - least) * (f32(1) / last), np.abs(least) * f32(2.0**-15))
        scale = scale.astype(of_scale.numpy).astype(f32)
        inverse = f32(1) / np.where(scale == 0, f32(1), scale)
        zero = (least * inverse).astype(of_scale.numpy).astype(f32)
    steps = x.astype(np.float64) * inverse[..., None] - zero[..., None]  # one rounding, as that of a fused product
    elements = np.clip(np.rint(steps.astype(f32)), 0, last).astype(np.uint8)
    scale = np.where(scale == 0, f32(1), scale)
    return elements, np.stack((scale, zero), -1).astype(of_scale.numpy)


def decode(record: Record, row: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The values, f32 [..., D], of a row and scales as :func:`encode` gives them, with no rotation left."""
    elements = row
    if record.elements.code:
        eights = row.reshape(*row.shape[:-1], row.shape[-1] // record.elements.bits, record.elements.bits)
        elements = uncoded(eights, record.elements).reshape(*row.shape[:-1], CODED * eights.shape[-2])
    elif record.packed:
        elements = numbers(unpacked(row), record.elements)
    size, count = elements.shape[-1], record.group_scales
    x = grouped(elements, record.group)
    pairs = scales.reshape(*x.shape[:-1], count)
    found = dequantize(x, pairs[..., :1], dtypes.f32, pairs[..., 1:] if record.zero else None)
    found = found.reshape(*elements.shape[:-1], x.shape[-2] * record.group)
    return rotated(found[..., :size], record.rotation)


def grouped(x: np.ndarray, group: int) -> np.ndarray:
    """Groups of the last dimension, [..., groups, group]; a short last one is padded with zeros."""
    missing = -x.shape[-1] % group
    if missing:
        x = np.concatenate((x, np.zeros((*x.shape[:-1], missing), x.dtype)), -1)
    return x.reshape(*x.shape[:-1], x.shape[-1] // group, group)


def rounded_scale(record: Record, scale: np.ndarray) -> np.ndarray:
    """f32 scales in the type of a record's scales."""
    of = record.scale
    assert of is not None
    if of is dtypes.f8e8m0:
        with np.errstate(divide="ignore"):
            exponent = np.clip(np.ceil(np.log2(scale.astype(np.float64))), -127, 127)
        return np.where(scale == 0, 1.0, np.exp2(exponent)).astype(of.numpy)
    if record.packed and of is dtypes.f16:
        scale = np.minimum(scale, np.float32(of.largest))
    stored = saturating_cast(np.where(scale == 0, 0 if record.keeps_zero_scales else 1, scale), of)
    return stored if record.keeps_zero_scales else np.where(stored == 0, np.ones((), of.numpy), stored)


def rounded(x: np.ndarray, dtype: DType) -> np.ndarray:
    """f32 numbers as elements of a record without zeros; 4-bit ones as uint8."""
    if not dtype.packed:
        return saturating_cast(x, dtype)
    bounds, signed = dtypes.bounds(dtype)
    code = np.zeros(x.shape, np.uint8)
    for bound in bounds:
        code += (np.abs(x) if signed else x) >= np.float32(bound)
    return code | np.signbit(x).astype(np.uint8) << 3 if signed else code


def coded(x: np.ndarray, dtype: DType) -> np.ndarray:
    """f32 numbers [..., D], already divided by scales, as the bytes of a user's own elements."""
    found = codes.of(dtype.code).to_bytes(x.reshape(*x.shape[:-1], x.shape[-1] // CODED, CODED))
    return found.reshape(*x.shape[:-1], dtype.units(x.shape[-1]))


def uncoded(eights: np.ndarray, dtype: DType) -> np.ndarray:
    """The numbers [..., 8] that the bytes [..., bits] of eight of a user's own elements stand for."""
    return codes.of(dtype.code).to_numbers(eights)


def numbers(elements: np.ndarray, dtype: DType) -> np.ndarray:
    """What 4-bit elements, uint8, stand for before zeros and scales, f32."""
    return np.array(dtype.table, np.float32)[elements]


def rotated(x: np.ndarray, block: int) -> np.ndarray:
    """Blocks of the last dimension times a Hadamard matrix over the square root of its order; its own inverse.

    In f32, as kernels do it: sums and differences at growing distances, then the factor.
    """
    if not block:
        return x
    distance = 1
    while distance < block:
        pairs = x.reshape(*x.shape[:-1], x.shape[-1] // (2 * distance), 2, distance)
        low, high = pairs[..., 0, :], pairs[..., 1, :]
        x, distance = np.stack((low + high, low - high), -2).reshape(x.shape), 2 * distance
    return x * np.float32(block**-0.5)


def packed(elements: np.ndarray) -> np.ndarray:
    """4-bit elements as bytes of two, along the last dimension: the even one is the low half."""
    return elements[..., ::2] | elements[..., 1::2] << 4


def unpacked(row: np.ndarray) -> np.ndarray:
    """The 4-bit elements of bytes, uint8, along the last dimension."""
    return np.stack((row & 15, row >> 4), -1).reshape(*row.shape[:-1], 2 * row.shape[-1])
