"""Queries times keys, and weights times values, of a tile of positions, a few queries at a time.

Owns the order of these sums, which is the same however many queries share a strip. Knows the cache's pages; which tiles there are, and what
lies between scores and weights, is `attention.py`'s.
"""

from __future__ import annotations

from typing import Any

from numba import njit

from engine.kernels.cpu.kv import BFLOAT16, FLOAT32, ITEM_BYTES, PAGE
from engine.kernels.cpu.simd import get, load_bf16, load_f32, load_i8
from engine.kernels.cpu.simd_rows import add_rows, fma_rows, load_rows, rows_f32, store_rows

SPAN = 128  # positions of a tile
PAIRED = 32  # numbers of a head that are summed before they join the others


def _strips(kind: int, rows: int) -> tuple[Any, Any]:
    """(scores, mix) for `rows` queries at a time."""
    zeros = rows_f32(rows)
    size = ITEM_BYTES[kind]
    load = load_f32 if kind == FLOAT32 else load_i8

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def product(a, b, c, d, p, q, r, s, step, x, stride, count):
        """Accumulators += x[rows, count] times four vectors at p, q, r and s, `step` bytes further each time."""
        for _ in range(count):
            a = fma_rows(a, load(p), x, stride)
            b = fma_rows(b, load(q), x, stride)
            c = fma_rows(c, load(r), x, stride)
            d = fma_rows(d, load(s), x, stride)
            p += step
            q += step
            r += step
            s += step
            x += 4
        return a, b, c, d

    @njit(nogil=True, error_model="numpy")
    def scores(queries, head_dim, pages, kv, page_stride, count, out):
        """Queries [rows, head_dim] times the keys of `count` pages, into out [rows, SPAN]."""
        index = 0
        step = PAGE * size
        while count - index >= 4:
            p = kv + get(pages, index) * page_stride
            q = kv + get(pages, index + 1) * page_stride
            r = kv + get(pages, index + 2) * page_stride
            s = kv + get(pages, index + 3) * page_stride
            a, b, c, d = product(zeros(), zeros(), zeros(), zeros(), p, q, r, s, step, queries, 4 * head_dim, head_dim)
            at = out + 4 * PAGE * index
            store_rows(a, at, 4 * SPAN)
            store_rows(b, at + 64, 4 * SPAN)
            store_rows(c, at + 128, 4 * SPAN)
            store_rows(d, at + 192, 4 * SPAN)
            index += 4
        while index < count:
            p = kv + get(pages, index) * page_stride
            a = zeros()
            for i in range(head_dim):
                a = fma_rows(a, load(p + i * step), queries + 4 * i, 4 * head_dim)
            store_rows(a, out + 4 * PAGE * index, 4 * SPAN)
            index += 1

    @njit(nogil=True, error_model="numpy")
    def mix(weights, head_dim, pages, kv, page_stride, count, out, out_stride):
        """Weights [rows, SPAN] times the values of the first `count` positions, into out [rows, head_dim]."""
        values = kv + PAGE * head_dim * size
        step = head_dim * size
        chunk = 0
        while head_dim - chunk >= 64:
            a, b, c, d = zeros(), zeros(), zeros(), zeros()
            for index in range(0, count, PAGE):
                p = values + get(pages, index // PAGE) * page_stride + chunk * size
                x = weights + 4 * index
                a, b, c, d = product(
                    a, b, c, d, p, p + 16 * size, p + 32 * size, p + 48 * size, step, x, 4 * SPAN, min(PAGE, count - index)
                )
            store_rows(a, out + 4 * chunk, out_stride)
            store_rows(b, out + 4 * chunk + 64, out_stride)
            store_rows(c, out + 4 * chunk + 128, out_stride)
            store_rows(d, out + 4 * chunk + 192, out_stride)
            chunk += 64
        while chunk < head_dim:
            a = zeros()
            for index in range(0, count, PAGE):
                p = values + get(pages, index // PAGE) * page_stride + chunk * size
                for i in range(min(PAGE, count - index)):
                    a = fma_rows(a, load(p + i * step), weights + 4 * (index + i), 4 * SPAN)
            store_rows(a, out + 4 * chunk, out_stride)
            chunk += 16

    return scores, mix


def _paired(rows: int) -> tuple[Any, Any]:
    """(scores, mix) on bfloat16 for `rows` queries at a time.

    Even and odd terms are summed apart, 32 numbers of a head or 16 positions at a time, as a matrix unit does it (attention_matrix.py).
    """
    zeros = rows_f32(rows)

    @njit(nogil=True, error_model="numpy", forceinline=True)
    def product(p, q, step, x, stride, count):
        """x [rows, count] times two vectors at p and q, `step` bytes further each time."""
        a, b, c, d = zeros(), zeros(), zeros(), zeros()
        for _ in range(count // 2):
            a = fma_rows(a, load_bf16(p), x, stride)
            b = fma_rows(b, load_bf16(q), x, stride)
            c = fma_rows(c, load_bf16(p + step), x + 4, stride)
            d = fma_rows(d, load_bf16(q + step), x + 4, stride)
            p += 2 * step
            q += 2 * step
            x += 8
        if count % 2:
            a = fma_rows(a, load_bf16(p), x, stride)
            b = fma_rows(b, load_bf16(q), x, stride)
        return add_rows(a, c), add_rows(b, d)

    @njit(nogil=True, error_model="numpy")
    def scores(queries, head_dim, pages, kv, page_stride, count, out):
        """Queries [rows, head_dim] times the keys of `count` pages, into out [rows, SPAN]."""
        for index in range(0, count, 2):
            p = kv + get(pages, index) * page_stride
            two = index + 1 < count
            q = kv + get(pages, index + 1) * page_stride if two else p
            at = out + 4 * PAGE * index
            for start in range(0, head_dim, PAIRED):
                a, b = product(
                    p + 2 * PAGE * start, q + 2 * PAGE * start, 2 * PAGE, queries + 4 * start, 4 * head_dim, min(PAIRED, head_dim - start)
                )
                if start:
                    a, b = add_rows(load_rows(a, at, 4 * SPAN), a), add_rows(load_rows(b, at + 64, 4 * SPAN), b)
                store_rows(a, at, 4 * SPAN)
                if two:
                    store_rows(b, at + 64, 4 * SPAN)

    @njit(nogil=True, error_model="numpy")
    def mix(weights, head_dim, pages, kv, page_stride, count, out, out_stride):
        """Weights [rows, SPAN] times the values of the first `count` positions, into out [rows, head_dim]."""
        values = kv + 2 * PAGE * head_dim
        for chunk in range(0, head_dim, 32):
            two = head_dim - chunk > 16
            a, b = zeros(), zeros()
            for index in range(0, count, PAGE):
                p = values + get(pages, index // PAGE) * page_stride + 2 * chunk
                c, d = product(p, p + 32 if two else p, 2 * head_dim, weights + 4 * index, 4 * SPAN, min(PAGE, count - index))
                a, b = add_rows(a, c), add_rows(b, d)
            store_rows(a, out + 4 * chunk, out_stride)
            if two:
                store_rows(b, out + 4 * chunk + 64, out_stride)

    return scores, mix


def strips(kind: int) -> tuple[Any, Any]:
    """(all_scores, all_mixes) for any number of queries, as many at a time as registers hold."""
    if kind == BFLOAT16:
        (s1, m1), (s2, m2), (s3, m3), (s4, m4) = (_paired(rows) for rows in (1, 2, 3, 4))
        s_most, m_most, most = s4, m4, 4
    else:
        (s1, m1), (s2, m2), (s3, m3), (s4, m4), (s_most, m_most) = (_strips(kind, rows) for rows in (1, 2, 3, 4, 6))
        most = 6

    @njit(nogil=True, error_model="numpy")
    def all_scores(queries, total, head_dim, pages, kv, page_stride, count, out):
        done = 0
        while done < total:
            x, y = queries + 4 * head_dim * done, out + 4 * SPAN * done
            left = total - done
            if left >= most:
                s_most(x, head_dim, pages, kv, page_stride, count, y)
                done += most
            elif left >= 4:
                s4(x, head_dim, pages, kv, page_stride, count, y)
                done += 4
            elif left == 3:
                s3(x, head_dim, pages, kv, page_stride, count, y)
                done += 3
            elif left == 2:
                s2(x, head_dim, pages, kv, page_stride, count, y)
                done += 2
            else:
                s1(x, head_dim, pages, kv, page_stride, count, y)
                done += 1

    @njit(nogil=True, error_model="numpy")
    def all_mixes(weights, total, head_dim, pages, kv, page_stride, count, out, out_stride):
        done = 0
        while done < total:
            x, y = weights + 4 * SPAN * done, out + out_stride * done
            left = total - done
            if left >= most:
                m_most(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += most
            elif left >= 4:
                m4(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 4
            elif left == 3:
                m3(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 3
            elif left == 2:
                m2(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 2
            else:
                m1(x, head_dim, pages, kv, page_stride, count, y, out_stride)
                done += 1

    return all_scores, all_mixes
