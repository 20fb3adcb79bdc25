"""Evaluation of measurements: median, ratio, verdict, and the format of each."""

import statistics

GIB = 1 << 30
MIB = 1 << 20
KIB = 1 << 10


def verdict(met):
    return "not measured" if met is None else "met" if met else "MISSED"


def mid(got, key):
    values = [g[key] for g in got if g.get(key) is not None]
    return statistics.median(values) if values else None


def speed(got):
    gbps, cpu = mid(got, "gbps"), mid(got, "cpu_per_gb")
    return "-" if gbps is None else f"{gbps:.2f} GB/s, {cpu:.3f} s/GB" if cpu is not None else f"{gbps:.2f} GB/s"


def rate(got):
    gbps = mid(got, "gbps")
    return "-" if gbps is None else f"{gbps:.2f} GB/s"


def ratio(a, b):
    return None if a is None or not b else a / b


def shown(r):
    return "-" if r is None else f"{r:.3f}"


def all_of(*conditions):
    return None if any(c is None for c in conditions) else all(conditions)


def over(value, bound):
    return None if value is None else value >= bound


def under(value, bound):
    return None if value is None else value <= bound
