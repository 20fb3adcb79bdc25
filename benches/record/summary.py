"""A short summary of all steps' results: the figures in order, with MISSED at each goal that was not met."""

import collections
import json


def tail(path, count=6):
    try:
        return path.read_text(errors="replace").strip().splitlines()[-count:]
    except OSError:
        return []


def load(path):
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def verdict(met):
    return "not measured" if met is None else "met" if met else "MISSED"


def cut(text, width):
    return f"{text:<{width}.{width}}"


def rows(directory):
    """The table of benches/gpu."""
    found = load(directory / "raw.json") or {"table": [], "notes": []}
    for t in found["table"]:
        goal = f"{t['goal']}: {verdict(t['met'])}" if t["goal"] != "-" else ""
        yield f"{cut(t['row'], 10)} {cut(t['work'].strip(), 52)} {cut(t['us'], 24)} {cut(t['ratio'], 19)} {goal}"
    # Wrong bytes first; a missing peer leaves a note at each row.
    notes = collections.Counter(sorted(found["notes"], key=lambda n: not n.startswith("WRONG")))
    for note, times in [*notes.items()][:12]:
        yield f"note: {f'{times} times: ' if times > 1 else ''}{note[:160]}" + (" MISSED" if note.startswith("WRONG") else "")


def loads(directory):
    """The results of benches/safetensors."""
    found = {r["row"]: r for r in load(directory / "loads.json") or []}
    for name, r in found.items():
        if "skipped" in r:
            yield f"{cut(name, 16)} not measured: {r['skipped'][:150]}"
            continue
        right = {True: "right", False: "WRONG: MISSED", None: ""}[r["right"]]
        yield f"{cut(name, 16)} {r['bytes'] / 1e9:5.2f} GB  again {r['gbps']:6.2f}  at once {r['at_once_gbps']:6.2f}  first {r['first_gbps']:6.2f} GB/s  {right}"
    for peer, goal in (("safetensors", 5), ("fastsafetensors", 20)):
        a, b = (found.get(name, {}).get("gbps") for name in ("spinio", peer))
        if a and b:
            yield f"{cut('spinio', 16)} {a / b:.2f} of {peer}; {goal}: {verdict(a >= goal * b)}"


def figure(directory):
    """One line for a figure of the paper: SPIN at each setting, and its ratio to the best other method."""
    found = next(filter(None, map(load, sorted(directory.glob("*.json")))), None)
    if not found:
        return
    cells = []
    for label in dict.fromkeys(c["setting"] for c in found["cells"]):
        at = {c["method"]: c["mean"] for c in found["cells"] if c["setting"] == label}
        others = [v for m, v in at.items() if m != "SPIN"]
        if "SPIN" in at and others:
            cells.append(f"{label} {at['SPIN']:.3g} ({at['SPIN'] / max(others):.2f}x)")
    yield "; ".join(cells)
    for why in found["not_measured"]:
        yield f"not measured: {why[:120]}"


def counting(directory):
    """The table of benches/calls/device_call.c; its goal is 1.01."""
    for line in tail(directory / "log.txt", 7):
        words = line.split()
        met = verdict(float(words[3]) <= 1.01) if words[:1] == ["counting"] and len(words) > 3 else ""
        yield f"{line}  {'1.01: ' + met if met else ''}".rstrip()


def programs(directory):
    """The goals of the twelve programs."""
    try:
        lines = (directory / "README.md").read_text().splitlines()
    except OSError:
        return
    yield from (line for line in lines if line.startswith("| ") and line.endswith(("| met |", "| MISSED |")))


def ends(count):
    return lambda directory: (line for line in tail(directory / "log.txt", count) if not line.startswith("$ "))


def tests(directory):
    """The failures of a suite, and the count."""
    lines = tail(directory / "log.txt", 100000)
    yield from (line for line in lines if line.startswith(("FAIL", "== ")) and "passed" not in line)
    yield from lines[-1:]


def pytest(directory):
    lines = tail(directory / "log.txt", 100000)
    yield from (line[:160] for line in lines if line.startswith(("FAILED ", "ERROR ", "memory")))
    yield from lines[-1:]


TABLES = {"two-gpus": tests, "suite": tests, "speed": rows, "cold": rows, "device-call": counting, "host-call": ends(9), "loads": loads, "loads-6-gib": loads,
          "pytest": pytest, "moves": ends(2), "example": ends(3), "programs": programs, "calibrate": ends(12),
          **{name: figure for name in ("fig1", "fig4a", "fig4b", "fig4d", "fig5", "table3")}}


def table(directory, results):
    """All steps: the result of each, then its figures; at the end the missed goals."""
    missed = []
    yield "=" * 60
    for r in results:
        failed = r["status"] not in (0, None)
        yield f"-- {r['step']}: {r['ended']}, {r['seconds']:.0f} s"
        if failed or r["status"] is None:
            missed.append(f"{r['step']}: {r['ended']}")
        try:
            for line in TABLES.get(r["step"], lambda _: [])(directory / r["step"]):
                yield line
                if line.endswith("MISSED") or "MISSED |" in line or line.startswith(("FAIL", "ERROR")):
                    missed.append(" ".join(line.split()))
        except Exception as e:  # a file that cannot be parsed must not affect the others
            yield f"cannot parse its figures: {type(e).__name__}: {e}"
    yield "=" * 60
    yield f"{len(missed)} missed or failed" + (":" if missed else "")
    yield from (f"  {line[:72]}" for line in missed)
