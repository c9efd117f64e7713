"""The kernel that places barriers; a pass has a thousand launches, too many pairs for Python."""

from cudflash.ops.cpu import simd as S


def build():
    """Python function of the kernel ``program_barriers``, for one thread.

    ``args`` is ``[heads, spans, program, n_ops, n_threads, serial_bytes, serial_bytes_by_rows]``.
    ``heads`` has ``[entry, args, touched, rows, n_reads, n_spans]`` per launch, ``spans`` their
    ``[first, past the last, by rows]`` one after the other, reads before writes.
    """
    from numba import njit

    @njit(inline="always")
    def meet(a, whole_a, b, whole_b):
        """Whether two spans want their launches in order."""
        first_a, last_a = S.peek_i64(a), S.peek_i64(a + 8)
        first_b, last_b = S.peek_i64(b), S.peek_i64(b + 8)
        if first_a >= last_b or first_b >= last_a:
            return False
        if whole_a or whole_b or S.peek_i64(a + 16) == 0 or S.peek_i64(b + 16) == 0:
            return True
        return first_a != first_b or last_a != last_b

    @njit
    def conflict(a, reads_a, all_a, whole_a, b, reads_b, all_b, whole_b):
        """Whether one of two launches writes what the other touches."""
        for i in range(all_a):
            # what is only read minds writes alone
            for j in range(reads_b if i < reads_a else 0, all_b):
                if meet(a + 24 * i, whole_a, b + 24 * j, whole_b):
                    return True
        return False

    def barriers(args, tid, n_threads):
        heads, spans, program = S.peek_i64(args), S.peek_i64(args + 8), S.peek_i64(args + 16)
        n, threads = S.peek_i64(args + 24), S.peek_i64(args + 32)
        most, most_by_rows = S.peek_i64(args + 40), S.peek_i64(args + 48)
        first, first_spans = 0, spans  # since the last barrier
        now = spans
        for i in range(n):
            head, record = heads + 48 * i, program + 32 * i
            rows, reads, count = (
                S.peek_i64(head + 24), S.peek_i64(head + 32), S.peek_i64(head + 40))
            by_rows = rows > 0 and rows % threads == 0
            serial = S.peek_i64(head + 16) <= (most_by_rows if by_rows else most)
            whole = serial or not by_rows
            barrier, then = False, first_spans
            for j in range(first, i):
                other = heads + 48 * j
                others = S.peek_i64(other + 40)
                alone = S.peek_i64(program + 32 * j + 24) != 0
                if not (serial and alone):
                    rows_j = S.peek_i64(other + 24)
                    whole_j = alone or rows_j <= 0 or rows_j % threads != 0
                    if conflict(now, reads, count, whole, then, S.peek_i64(other + 32), others,
                                whole_j):  # fmt: skip
                        barrier = True
                        break
                then += 24 * others
            if barrier:
                first, first_spans = i, now
            S.poke_i64(record, S.peek_i64(head))
            S.poke_i64(record + 8, S.peek_i64(head + 8))
            S.poke_i64(record + 16, 1 if barrier else 0)
            S.poke_i64(record + 24, 1 if serial else 0)
            now += 24 * count

    return barriers
