# SPDX-License-Identifier: Apache-2.0 WITH LLVM-exception
"""The products of decode attention: a warp's multiplication of a tile of K with its query rows, and of V with weights.

Scores are K Q^T with the query rows of the group in the 8 columns of an mma; movmatrix turns the weights into the
second product's operand; the output is V^T P^T. Head sizes are padded to whole k-steps with zeros: in shared memory in
the columns of K, in registers in those of the query.

16-bit elements are multiplied without conversion (m16n8k16).

8-bit and 4-bit elements are converted to f16 in pairs (:mod:`kvarn.lowering.kernels.elements`). K's bytes keep their
order in a register, which permutes the head dimension within each 16, or each 32 of 4 bits; the query is read with the
same permutation. Rows of the output are then even and odd elements. If the 16 elements of a k-step have several scales,
each element is multiplied by its scale, divided by a power of two (of the tile for K, of all scales so far for V);
otherwise K's scales multiply the scores, and V's scales the weights.

f32 elements are split into two tf32 numbers, the rounded value and the remainder, and multiplied in three products
(m16n8k8), which is exact up to f32's own rounding. V's fragments are loaded word by word, with the tokens of a k-step
in the order of the transposed weights.
"""

from __future__ import annotations

from types import SimpleNamespace

import kvarn as kv
from kvarn.dialect.layout import cdiv
from kvarn.lowering.schedules.decode import COLUMNS, DecodeConfig

from ... import hadamard
from ...elements import factors_of_word, offsets, ones, scaled_by, widened, widened_columns

_REPRESENTABLE = -0x2000  # mask of the bits of an f32 that tf32 has


def products(c: DecodeConfig, stream: SimpleNamespace) -> SimpleNamespace:
    """The functions for a configuration: those of the query, of the scores and of the values."""
    spec, G, NT, GC = c.spec, c.head_rows, c.column_tiles, c.scales
    KS, QS = c.row_steps, c.key_steps
    shared_offset = stream.shared_offset
    SCALED = c.scaled_elements
    GN, ZS, ZC = c.granules, c.zero_sums, c.zero_columns
    GS = spec.granularity // 16 if GN > 1 and not SCALED else KS  # steps per granule
    FACTORS, CHUNK = factors_of_word(spec.dtype), 16 * c.interleaved
    # Whether the steps of a granule add to one accumulator; granules, of which there are several, are independent.
    CHAINED = bool(ZS) and GN > 1

    def granule_of(ks):
        """The granule of a step's elements; steps past the last granule are zeros."""
        return min(ks // GS, max(GN, 1) - 1)

    def chunk_offset(row, chunk, first):
        """Byte of chunk ``first`` + ``chunk`` of a row, at a constant distance from one of a few addresses."""
        if c.wide or c.query_in_shared:
            return shared_offset(row, first % 8 + chunk) + first // 8 * 128
        return shared_offset(row, first + chunk)

    # --- the query ---------------------------------------------------------------------------------

    @kv.func
    def joined_word(query, token, h, ks, u, lane, own):
        """:func:`query_word` of joined heads: zero in the columns of other heads than the row's own."""
        width = 1 if c.wide else 2
        at = 4 * u + (lane & 3) if c.wide else (lane & 3) * 4 + 2 * u if c.narrow else (lane & 3) * 2 + 8 * u
        column = ks * (8 if c.wide else 16) + at - own * spec.head_size
        inside = (column >= 0) & (column < spec.head_size)
        found = query.load(*token, h, kv.math.max(kv.math.min(column, spec.head_size - width), 0), width=width)
        if c.narrow and c.case.query is not kv.f16:
            found = kv.f16(kv.f32(found))
        return kv.where(inside, kv.bitcast(found, kv.i32), 0)

    @kv.func
    def packed_words(query, token, h, lane, column0):
        """The words of a query row over 4-bit elements, [2 * step + word]: elements j and j + 4 of 8, with a factor."""
        found, words = [], []
        for chunk in kv.static(range(c.size // 32)):
            column = chunk * 32 + (lane & 3) * 8 + column0
            found.append(kv.f32(query.load(*token, h, column, width=8, alignment=c.query_alignment)))
        if spec.rotation:
            found = hadamard.of_vectors(found, spec.rotation, 4, lane)
        for ks in kv.static(range(QS)):
            for u in kv.static(range(2)):
                j, x = 2 * (ks % 2) + u, found[ks // 2]
                words.append(kv.pack_f16x2(*(x[i] * (1.0 / FACTORS[j]) for i in (j, j + 4))))
        return words

    @kv.func
    def query_word(query, token, h, ks, u, lane, column0):
        """Word u of a step's fragment of a query row from ``column0`` up; zero in padding columns."""
        if c.wide:
            column = ks * 8 + 4 * u + (lane & 3)
            if ks * 8 + 4 * u >= c.size:
                return kv.i32(0)
            return kv.bitcast(query.load(*token, h, column + column0, width=1), kv.i32)
        if c.narrow:
            column = ks * 16 + (lane & 3) * 4 + 2 * u
            if ks * 16 >= c.size:
                return kv.i32(0)
            there = kv.math.min(column, c.size - 2) if c.size - ks * 16 < 16 else column
            pair = query.load(*token, h, there + column0, width=2)
            if c.case.query is not kv.f16:
                pair = kv.f16(kv.f32(pair))
            word = kv.bitcast(pair, kv.i32)
            return kv.where(column < c.size, word, 0) if c.size - ks * 16 < 16 else word
        if ks * 16 + 8 * u >= c.size:
            return kv.i32(0)
        column = ks * 16 + (lane & 3) * 2 + 8 * u
        return kv.bitcast(query.load(*token, h, column + column0, width=2), kv.i32)

    @kv.func
    def query(query, queries, b, head, row0, n, lane, place, column0):
        """The query rows as the second operand of the first product: [column tile][2 * step + word].

        For wide heads they are in shared memory, at ``place``.
        """
        found = []
        for nt in kv.static(range(NT)):
            row = row0 + nt * COLUMNS + (lane >> 2)
            exists = row < n * G
            safe = kv.where(exists, row, 0)
            token = queries.at(queries.base(b), safe // G)
            h = head * G + safe % G
            words, packed = [], None
            if spec.packed:
                packed = packed_words(query, token, h, lane, column0)
            for ks in kv.static(range(QS)):
                for u in kv.static(range(2)):
                    if packed is not None:
                        word = packed[2 * ks + u]
                    elif c.joined > 1:
                        word = joined_word(query, token, h, ks, u, lane, safe % G // c.case.group)
                    else:
                        word = query_word(query, token, h, ks, u, lane, column0)
                    word = kv.where(exists, word, 0)
                    if c.query_in_shared:
                        (query_place(place, nt, ks, lane) + 4 * u).store(word)
                    else:
                        words.append(word)
            found.append(words)
        if ZS:
            if c.query_in_shared:
                kv.syncwarp()
            found.extend([query_sums(found, place, nt, lane) for nt in range(NT)])
        return found

    @kv.func
    def query_sums(q, place, nt, lane):
        """The sums over each granule of the query rows, as the zeros of keys are multiplied with them.

        Products with ones add them up. With one granule a lane has the sums of its two scores' rows, in the scores'
        unit. With several it has :func:`zero_products`' second operands: rows of the products are granules.
        """
        sums = [kv.f32(0.0)] * 4
        for ks in kv.static(range(QS)):
            words = []
            for u in kv.static(range(2)):
                one = kv.i32(ones(FACTORS[2 * (ks % 2) + u]))
                for upper in kv.static(range(2)):
                    here = one
                    if GN > 1:
                        granule = 8 * upper + ((lane >> 2) % 4 if GN <= 4 else lane >> 2)
                        here = kv.where(granule == granule_of(ks), one, 0)
                    words.append(here)
            sums = kv.mma_m16n8k16(words, query_step(q, place, nt, ks, lane), sums, c.mma)
        if GN == 1:
            return [x * (1.0 / scaled_by(spec.dtype)) for x in sums[:2]]
        found = []
        for first in kv.static(range(0, GN, 8)):
            pair = sums[first // 4 : first // 4 + 2]
            high = kv.pack_f16x2(*pair)
            rounded = kv.bitcast(high, kv.f16)
            low = kv.pack_f16x2(*(x - kv.f32(rounded[i]) for i, x in enumerate(pair)))
            if GN <= 4:  # rows of the second half repeat the granules: their operands are the remainders
                both = kv.movmatrix(kv.where(lane < 16, high, low))
                found.extend([both, kv.where((lane & 3) < 2, both, 0)])
            else:
                found.extend([kv.movmatrix(high), kv.movmatrix(low)])
        return found

    @kv.func
    def query_place(place, nt, ks, lane):
        return place + ((nt * QS + ks) * 32 * 8) + lane * 8

    @kv.func
    def empty_query():
        """Placeholder for the query rows before the first sequence."""
        words = [[kv.i32(0)] * (0 if c.query_in_shared else 2 * QS) for _ in range(NT)]
        zero = kv.f32(0.0) if GN == 1 else kv.i32(0)
        return words + [[zero] * (2 * cdiv(GN, 8)) for _ in range(NT if ZS else 0)]

    @kv.func
    def query_step(q, place, nt, ks, lane):
        """The two words of a step."""
        if c.query_in_shared:
            pair = query_place(place, nt, ks, lane).load(kv.i32, 2)
            return [pair[0], pair[1]]
        return [q[nt][2 * ks], q[nt][2 * ks + 1]]

    # --- fragments ---------------------------------------------------------------------------------

    @kv.func
    def key_fragments(stage, mt, k, lane):
        """K as the first operand of the first product, for the 32 bytes from 32 k up: 1, 2 or 4 steps of 4 words."""
        row = mt * 16 + (lane & 7) + ((lane >> 3) & 1) * 8
        loaded = kv.ldmatrix(stage + chunk_offset(row, lane >> 4, 2 * k))
        if not c.narrow:
            return [loaded]
        words, found = [widened(spec.dtype, w) for w in loaded], []
        for u in kv.static(range(2)):
            low, high = words[2 * u], words[2 * u + 1]
            for s in kv.static(range(0, len(low), 2)):
                found.append([low[s], high[s], low[s + 1], high[s + 1]])
        return found

    @kv.func
    def value_fragments(stage, mt, t, lane):
        """V transposed as the first operand of the second product: 1, 2 or 4 steps of the head size, 4 words each."""
        base = stage + c.half_stage
        if c.narrow:
            row = mt * 16 + (lane & 7) + ((lane >> 3) & 1) * 8
            loaded = kv.ldmatrix(base + chunk_offset(row, lane >> 4, 2 * t), trans=True)
            words, found = [widened_columns(spec.dtype, w) for w in loaded], []
            for u in kv.static(range(2)):
                low, high = words[2 * u], words[2 * u + 1]
                for s in kv.static(range(0, len(low), 2)):
                    found.append([low[s], low[s + 1], high[s], high[s + 1]])
            return found
        row = mt * 16 + (lane & 7) + (lane >> 4) * 8
        return [kv.ldmatrix(base + chunk_offset(row, (lane >> 3) & 1, 2 * t), trans=True)]

    @kv.func
    def wide_value_fragment(stage, first, t, lane):
        """V transposed for 8 tokens from ``first`` up: token 2 (lane % 4) and the next, elements lane / 4 and + 8."""
        base, found = stage + c.half_stage, []
        for u in kv.static(range(2)):
            for v in kv.static(range(2)):
                row = first + 2 * (lane & 3) + u
                at = chunk_offset(row, lane >> 4, 4 * t + 2 * v) + ((lane >> 2) & 3) * 4
                found.append((base + at).load(kv.i32))
        return found

    @kv.func
    def parts(words):
        """f32 words as (tf32 part, remainder) each."""
        high = [w & _REPRESENTABLE for w in words]
        return high, [
            kv.bitcast(kv.bitcast(w, kv.f32) - kv.bitcast(x, kv.f32), kv.i32) for w, x in zip(words, high, strict=True)
        ]

    @kv.func
    def multiplied(a, b, sums):
        """sums + a @ b; for f32, a and b are :func:`parts`."""
        if c.wide:
            for x, y in ((a[1], b[0]), (a[0], b[1]), (a[0], b[0])):  # the smallest first
                sums = kv.mma_m16n8k8_tf32(x, y, sums)
            return sums
        return kv.mma_m16n8k16(a, b, sums, c.mma)

    @kv.func
    def granule_scale(stage, half, ks, element, token):
        """The scale of an element of a step, counted from the step's first column, of K or V; zero past the last
        granule. It is multiplied by what elements lack.
        """
        size, first = spec.granularity, ks // c.interleaved * CHUNK
        granule = first // size + element // size if CHUNK % size == 0 else (first + element) // size
        if first + CHUNK > GN * size:
            granule = kv.math.min(granule, GN - 1)
        found = stream.scale_at(stage, half, granule, token).load(kv.f32)
        return found if scaled_by(spec.dtype) == 1.0 else found * scaled_by(spec.dtype)

    @kv.func
    def times(words, pairs):
        """Pairs of f16 times pairs of f16."""
        return [
            kv.bitcast(kv.bitcast(w, kv.f16) * kv.bitcast(x, kv.f16), kv.i32) for w, x in zip(words, pairs, strict=True)
        ]

    @kv.func
    def factors_of_keys(stage, mt, ks, unit, lane):
        """K's scales for the fragments of a step: a lane has columns of two rows, within one granule."""
        pairs = []
        for half in kv.static(range(2)):
            token = mt * 16 + 8 * half + (lane >> 2)
            one = granule_scale(stage, 0, ks, (lane & 3) * (4 * c.interleaved), token) * unit[1]
            pairs.append(kv.pack_f16x2(one, one))
        return [pairs[i % 2] for i in range(4)]

    @kv.func
    def factors_of_values(stage, mt, ks, unit, lane):
        """V's scales for the transposed fragments of a step: a lane has neighbouring elements of four tokens."""
        pairs = []
        for half in kv.static(range(2)):
            token = mt * 16 + 8 * half + (lane & 3) * 2
            column = (lane >> 2) * (2 * c.interleaved)
            both = [granule_scale(stage, 1, ks, column, token + i) * unit[1] for i in range(2)]
            pairs.append(kv.pack_f16x2(*both))
        return [pairs[i // 2] for i in range(4)]

    # --- the first product ---------------------------------------------------------------------------

    @kv.func
    def scale_of(stage, which, mt, half, lane):
        """A scale of the token of a lane's scores 2 * half and 2 * half + 1 in a row tile."""
        return stream.scale_at(stage, which // GC, which % GC, mt * 16 + 8 * half + (lane >> 2)).load(kv.f32)

    @kv.func
    def scores(q, place, stage, mt, unit, lane):
        """K Q^T for 16 tokens, including K's scales: [column tile][4]."""
        a = []
        if not c.query_in_shared:
            loads = cdiv(QS * c.step_bytes, 32)
            a = [f for k in range(loads) for f in key_fragments(stage, mt, k, lane)]
            by = []
            for ks in kv.static(range(QS if SCALED else 0)):
                if ks % c.interleaved == 0:  # interleaved steps have the same scales
                    by = factors_of_keys(stage, mt, ks, unit, lane)
                a[ks] = times(a[ks], by)
        scales = scales_of_keys(stage, mt, lane) if ZS else None
        zeros = zeros_of_keys(stage, mt, lane) if GN > 1 and ZS else None
        return [score_tile(a, q, place, stage, (mt, nt), unit, (scales, zeros), lane) for nt in range(NT)]

    @kv.func
    def scales_of_keys(stage, mt, lane):
        """K's scales and zeros of the tokens of a lane's scores, [half][granule]."""
        found = []
        for half in kv.static(range(2)):
            words = stream.pairs(stage, 0, mt * 16 + 8 * half + (lane >> 2))
            found.append([kv.f32(kv.bitcast(word, spec.scale_dtype)) for word in words])
        return found

    @kv.func
    def zeros_of_keys(stage, mt, lane):
        """The zeros times scales of 16 keys, as the first operands of products with :func:`query_sums`.

        Columns are granules: first the rounded products, then their remainders, each repeated if there are up to 4.
        """
        found, column = [], 2 * (lane & (1 if GN <= 4 else 3))
        for first in kv.static(range(0, GN, 8)):
            words = []
            for half in kv.static(range(2)):
                row = stream.scale_at(stage, 0, 0, mt * 16 + 8 * half + (lane >> 2))
                if GN % 2 == 0:
                    both = (row + 4 * kv.math.min(first + column, GN - 2)).load(kv.i32, 2)
                    pair = [both[0], both[1]]
                else:
                    pair = [(row + 4 * kv.math.min(first + column + i, GN - 1)).load(kv.i32) for i in range(2)]
                words.append(offsets(*pair))
            found.append([words[0][0], words[1][0], words[0][1], words[1][1]])
        return found

    @kv.func
    def zero_products(zeros, sums):
        """The part of scores that K's zeros add: sums of query rows times zeros times scales, in two terms each."""
        found = [kv.f32(0.0)] * 4
        for i in kv.static(range(len(zeros))):
            first, second = sums[2 * i], sums[2 * i + 1]
            if GN <= 4:
                found = kv.mma_m16n8k16(zeros[i], [first, second], found, c.mma)
            else:
                found = kv.mma_m16n8k16(zeros[i], [second, kv.i32(0)], found, c.mma)
                found = kv.mma_m16n8k16(zeros[i], [first, first], found, c.mma)
        return found

    @kv.func
    def score_tile(a, q, place, stage, at, unit, scaling, lane):
        """K Q^T for 16 tokens and 8 rows, from given fragments, or from fragments that are loaded one by one.

        ``at`` is (row tile, column tile), ``scaling`` what :func:`scales_of_keys` and :func:`zeros_of_keys` give.
        """
        (mt, nt), (scales, zeros) = at, scaling
        found = [kv.f32(0.0)] * 4
        both, held, by = [[kv.f32(0.0)] * 4, [kv.f32(0.0)] * 4], [], []
        for ks in kv.static(range(QS)):
            if c.query_in_shared:
                if ks * c.step_bytes % 32 == 0:
                    held = key_fragments(stage, mt, ks * c.step_bytes // 32, lane)
                fragment = held[ks % len(held)]
                if SCALED:
                    if ks % c.interleaved == 0:
                        by = factors_of_keys(stage, mt, ks, unit, lane)
                    fragment = times(fragment, by)
            else:
                fragment = a[ks]
            b = query_step(q, place, nt, ks, lane)
            if c.wide:
                fragment, b = parts(fragment), parts(b)
            slot = 0 if CHAINED else ks % 2
            both[slot] = multiplied(fragment, b, both[slot])
            if GC and not SCALED:
                if (ks + 1) % GS == 0 or ks + 1 == QS:
                    g = granule_of(ks)
                    if scales is None:
                        scale = [scale_of(stage, g, mt, half, lane) for half in range(2)]
                    else:
                        scale = [scales[half][g][0] for half in range(2)]
                    for i in kv.static(range(4)):
                        one = both[slot][i] if CHAINED or GS == 1 else both[0][i] + both[1][i]
                        if ZS and GN == 1:  # q . (n + zero) = q . n + sum(q) * zero
                            one = one + q[NT + nt][i % 2] * scales[i // 2][g][1]
                        found[i] = found[i] + one * scale[i // 2]
                    both = [[kv.f32(0.0)] * 4, [kv.f32(0.0)] * 4]
        if zeros is not None:  # q . (n + zero) * scale = q . n * scale + sum(q) * (zero * scale)
            added = zero_products(zeros, q[NT + nt])
            found = [kv.math.fma(found[i], kv.f32(scaled_by(spec.dtype)), added[i]) for i in range(4)]
        if not GC or SCALED:
            found = [both[0][i] + both[1][i] if QS > 1 else both[0][i] for i in range(4)]
            if SCALED:
                found = [x * unit[0] for x in found]
        return found

    @kv.func
    def whole_scores(found, stages, place, slice, lane):
        """Scores over all columns of a head, summed over the warps that share it: [column tile][4].

        ``stages`` is the first warp's memory, ``place`` the offset for this exchange; consecutive exchanges use
        different offsets. All warps add the same numbers in the same order, so that their softmaxes are identical.
        """
        own = stages + (slice * c.warp_bytes + place + lane * 16)
        for nt in kv.static(range(NT)):
            (own + nt * 512).store(kv.from_lanes(found[nt], kv.f32))
        kv.named_barrier(1 + kv.warp_id() // c.slices, 32 * c.slices)
        sums = []
        for nt in kv.static(range(NT)):
            first = stages + (place + lane * 16 + nt * 512)
            fours = [(first + w * c.warp_bytes).load(kv.f32, 4) for w in range(c.slices)]
            four = [fours[0][i] for i in range(4)]
            for other in kv.static(fours[1:]):
                four = [x + other[i] for i, x in enumerate(four)]
            sums.append(four)
        return sums

    # --- the second product --------------------------------------------------------------------------

    @kv.func
    def pack(a, b):
        return kv.pack_f16x2(a, b) if c.mma is kv.f16 else kv.pack_bf16x2(a, b)

    @kv.func
    def weights(p, stage, unit, g, mt, lane):
        """The weights of 16 tokens as the second operand of the second product, with V's per-token scales.

        Without V's scales where these come with zeros: :func:`scales_of_values`.
        """
        if GC and not (SCALED or ZS):
            scales = [scale_of(stage, GC + g, mt, half, lane) * unit[1] for half in range(2)]
            p = [p[i] * scales[i // 2] for i in range(4)]
        return [kv.movmatrix(pack(p[0], p[1])), kv.movmatrix(pack(p[2], p[3]))]

    @kv.func
    def scales_of_values(stage, mt, lane):
        """V's scales of 16 tokens, [granule][half]: of the two tokens of a lane's weights.

        Scales of f16 times weights up to 1 lose no more than scales have lost: they need no unit.
        """
        found = [[] for _ in range(GN)]
        for half in kv.static(range(2)):
            words = [stream.pairs(stage, 1, mt * 16 + 8 * half + (lane & 3) * 2 + i) for i in range(2)]
            for g in kv.static(range(GN)):
                found[g].append(kv.prmt(words[0][g], words[1][g], 0x5410))
        return found

    @kv.func
    def zeros_of_values(stage, mt, lane):
        """V's zeros of 16 tokens, per four granules: of two tokens of column ``lane / 4`` of :func:`add_zeros`."""
        token, found = mt * 16 + (lane & 4) * 2 + (lane & 3) * 2, []
        for first in kv.static(range(0, GN, 4)):
            at = 4 * kv.math.min(first + (lane >> 3), GN - 1)
            words = [(stream.scale_at(stage, 1, 0, token + i) + at).load(kv.i32) for i in range(2)]
            found.append(kv.prmt(*words, 0x7632))
        return found

    @kv.func
    def add_zeros(b, zeros, sums, lane):
        """Add a tile's products of weights times scales, b[granule], with V's zeros.

        They are the rounded weights that elements are multiplied with, so that elements and zeros cancel. The operands
        trade places: rows are query rows. The halves of the tokens of a granule are two rows, lower and upper, and two
        columns, of which one each counts: column 2 * (granule % 4) of the lower and the next one of the upper row.
        """
        for first in kv.static(range(0, GN, 4)):
            zero, at = zeros[first // 4], first
            for g in kv.static(range(first, min(first + 4, GN), 2)):
                both, pair = [*b[g], kv.i32(0), kv.i32(0)], [zero, zero]
                if g + 1 < GN:
                    both = [*b[g], *b[g + 1]]
                if GN > 1:
                    pair = [kv.where((lane >> 3) == g - first + i, zero, 0) for i in range(2)]
                sums[at : at + 4] = multiplied(both, pair, sums[at : at + 4])

    @kv.func
    def wide_weights(p):
        """The f32 weights of 8 tokens, by halves of words: (token 2 (lane % 4), the next), as :func:`parts`."""
        bits = [kv.bitcast(x, kv.i32) for x in p]
        low, high = [kv.movmatrix(kv.prmt(bits[0], bits[1], selector)) for selector in (0x5410, 0x7632)]
        return parts([kv.prmt(low, high, 0x5410), kv.prmt(low, high, 0x7632)])

    @kv.func
    def add_values(p, stage, mt, o, scaling, lane):
        """o += V^T P^T for 16 tokens; ``p`` is [column tile][4], ``scaling`` (unit, sums of weights times zeros)."""
        unit, zeros = scaling
        if c.wide:
            for half in kv.static(range(2)):
                b = [wide_weights(p[nt][2 * half : 2 * half + 2]) for nt in range(NT)]
                for t in kv.static(range(KS)):
                    a = parts(wide_value_fragment(stage, mt * 16 + 8 * half, t, lane))
                    for nt in kv.static(range(NT)):
                        at = (nt * KS + t) * 4
                        o[at : at + 4] = multiplied(a, b[nt], o[at : at + 4])
            return
        step, b = c.load_steps, []
        fragments, plain, scaled = [], [], []
        if ZS:
            plain = [weights(p[nt], stage, unit, 0, mt, lane) for nt in range(NT)]
            scales, of_zeros = scales_of_values(stage, mt, lane), zeros_of_values(stage, mt, lane)
            scaled = [[times(plain[nt], scales[g]) for g in range(GN)] for nt in range(NT)]
            for nt in kv.static(range(NT)):
                sums = zeros[nt * ZC : (nt + 1) * ZC]
                add_zeros(scaled[nt], of_zeros, sums, lane)
                zeros[nt * ZC : (nt + 1) * ZC] = sums
        for t in kv.static(range(cdiv(KS, step))):
            for u in kv.static(range(min(step, KS - t * step))):
                ks = t * step + u
                if ks % GS == 0:  # a new granule: the first, or one with its own scales
                    if ZS:
                        b = [scaled[nt][granule_of(ks)] for nt in range(NT)]
                    else:
                        b = [weights(p[nt], stage, unit, granule_of(ks), mt, lane) for nt in range(NT)]
                if u == 0:
                    fragments = value_fragments(stage, mt, t, lane)
                if SCALED and ks % c.interleaved == 0:
                    by = factors_of_values(stage, mt, ks, unit, lane)
                a = times(fragments[u], by) if SCALED else fragments[u]
                for nt in kv.static(range(NT)):
                    at = (nt * KS + ks) * 4
                    o[at : at + 4] = multiplied(a, b[nt], o[at : at + 4])

    return SimpleNamespace(
        query=query, empty_query=empty_query, scores=scores, whole_scores=whole_scores, add_values=add_values,
        granule_of=granule_of,
    )  # fmt: skip
