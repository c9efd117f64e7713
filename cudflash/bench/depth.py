"""How far drafting pays: speed against the number of drafted tokens, k, drafter by drafter.

Owns the two sentences about it. Must not know how a record came about. More drafts per round always
accept more; whether they are worth their time is what the curve tells.
"""

FEWEST_POINTS = 3  # lanes of one drafter that make a curve


def depth_notes(record, rows):
    """Return a sentence per drafter and set: the fastest k, and the first longer one that loses.

    Parameters
    ----------
    record : dict
    rows : sequence of dict
        As ``report.rows`` returns them.
    """
    lanes = {lane["name"]: lane for group in record["groups"] for lane in group["lanes"]}
    curves = {}
    for row in rows:
        lane = lanes.get(row["lane"])
        if lane is None or lane["verify_length"] is None or lane["scripted"] or not row["t/s"]:
            continue
        key = (lane["drafter"], lane["accept"], lane["mode"], row["set"], row["test"], row["stop"])
        curves.setdefault(key, []).append((lane["verify_length"], row))
    return [
        _sentence(key, sorted(points, key=lambda point: point[0]))
        for key, points in curves.items() if len(points) >= FEWEST_POINTS
    ]  # fmt: skip


def _sentence(key, points):
    drafter, _, _, name, test, stop = key
    best_k, best = max(points, key=lambda point: point[1]["t/s"])
    text = (
        f"{name}, {test}, {stop} stop: {drafter} is fastest at k = {best_k} "
        f"({best['t/s']:.2f} t/s, {_length(best)} tokens per forward)"
    )
    later = [point for point in points if point[0] > best_k]
    if not later:
        return text + ", the longest that was measured"
    k, first = later[0]
    text += f"; from k = {k} on it loses: {first['t/s']:.2f} t/s at {_length(first)}"
    plain = [k for k, row in points if row["speed-up"] is not None and row["speed-up"] < 1]
    return text + (f"; slower than plain decoding at k = {plain[0]}" if plain else "")


def _length(row):
    value = row["acceptance length"]
    return "no" if value is None else f"{value:.3f}"
