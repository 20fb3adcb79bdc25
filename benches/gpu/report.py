"""The output of a run: README.md for people, raw.json for programs; and the merge of several runs."""

import datetime
import json
import os
import platform
import subprocess

from figures import GIB, verdict


def machine():
    def out(*command):
        try:
            return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
        except (OSError, subprocess.SubprocessError):
            return ""

    cpu = next((l.split(":", 1)[1].strip() for l in open("/proc/cpuinfo") if l.startswith("model name")), "?")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "gpu": (out("nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader").splitlines() or ["no GPU"])[0],
        "kernel": platform.release(),
        "cpus": f"{os.cpu_count()} x {cpu}",
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // GIB,
    }


def one(b, info):
    """A run in the format of raw.json."""
    return {"machine": info, "table": b.table, "notes": b.notes, "runs": b.raw}


def merged(parts, order):
    """Merges several runs; if more than one has a row, the last one counts."""
    of = {}
    for part in parts:
        for line in part["table"]:
            of[line["row"]] = part
    table = [line for name in order if name in of for line in of[name]["table"] if line["row"] == name]
    return {
        "machines": [part["machine"] | {"rows": sorted({line["row"] for line in part["table"]})} for part in parts],
        "table": table,
        "notes": [note for part in parts for note in part["notes"]],
        "runs": [run for part in parts for run in part["runs"]],
    }


def text(all):
    machines = all.get("machines") or [all["machine"]]
    lines = [f"# {machines[0]['gpu']}, {machines[0]['date']}", ""]
    for m in machines:
        rows = f" Rows: {', '.join(m['rows'])}." if len(machines) > 1 else ""
        lines += [f"{m['date']}: {m['cpus']}, {m['memory_gib']} GiB of memory, Linux {m['kernel']}, file system {m['filesystem']}. File of {m['file_gib']:g} GiB.",
                  f"Medians of {m['reps']} runs, each in a process of its own. Commit {m['commit']}. Command: `{m['command']}`.{rows}", ""]
    lines += ["Contexts spin (CUDA's default), for us and for the peers. CPU is user + system of the whole process per GB, including work deferred",
              "until after a return. Raw figures: raw.json.", "",
              "| work | limit | peer | us | ratio | must reach | |", "|---|---|---|---|---|---|---|"]
    for t in all["table"]:
        lines.append(f"| {t['work'].strip()} | {t['limit']} | {t['peer']} | {t['us']} | {t['ratio']} | {t['goal']} | {'' if t['goal'] == '-' else verdict(t['met'])} |")
    if all["notes"]:
        lines += ["", "Notes printed during the run:", ""] + [f"- {n}" for n in all["notes"]]
    return "\n".join(lines) + "\n"


def write(all, out):
    """Replaces each file atomically: the files of a killed run are read too."""
    for name, content in (("README.md", text(all)), ("raw.json", json.dumps(all, indent=1) + "\n")):
        new = out / (name + ".new")
        new.write_text(content)
        new.replace(out / name)


def verdicts(table):
    missed = [t["work"].strip() for t in table if t["met"] is False]
    return f"{sum(t['met'] is True for t in table)} met, {len(missed)} missed" + (": " + "; ".join(missed) if missed else "")
