"""What a check found, and the report of all of them. Torch-free."""

import json
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from armature.errors import masked

OK, WARNING, FAILURE = "ok", "warning", "failure"
EXIT_CODES = {OK: 0, WARNING: 1, FAILURE: 2}
GROUPS = ("environment", "launch", "communication", "gradients", "data", "run directory")
MOST_NAMES = 8  # of ranks or machines, in a sentence


class Finding(NamedTuple):
    """The result of one check.

    Args:
        group: one of GROUPS.
        what: one sentence: what was measured, or what is wrong.
        remedy: what to type or to change; empty if all is well.
        where: the machine or the rank that found it; empty if it holds for the whole run.
    """

    level: str
    group: str
    what: str
    remedy: str = ""
    where: str = ""


def ok(group: str, what: str, *, where: str = "") -> Finding:
    return Finding(OK, group, what, where=where)


def warning(group: str, what: str, *, remedy: str, where: str = "") -> Finding:
    return Finding(WARNING, group, what, remedy, where)


def failure(group: str, what: str, *, remedy: str, where: str = "") -> Finding:
    return Finding(FAILURE, group, what, remedy, where)


def refused(group: str, problems: Iterable[str]) -> list[Finding]:
    """Return the problems of a ConfigError, each of which ends the examination."""
    remedy = "Correct the command; nothing else was examined."
    return [failure(group, masked(each), remedy=remedy) for each in problems]


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 for warnings, 2 for failures."""
    return max((EXIT_CODES[finding.level] for finding in findings), default=0)


def listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return ", ".join(names[:MOST_NAMES]) + more


def listed_ranks(ranks: Sequence[int]) -> str:
    """Return `rank 3`, or `ranks 0, 2`; `no other rank` for none."""
    numbers = listed([str(rank) for rank in ranks])
    return f"rank{'s' * (len(ranks) > 1)} {numbers}" if ranks else "no other rank"


def merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return the findings in the order of GROUPS, those that several machines or ranks share as
    one.
    """
    places: dict[Finding, dict[str, None]] = {}
    for each in findings:
        places.setdefault(each._replace(where=""), {})[each.where] = None
    joined = [
        each._replace(where=listed([name for name in names if name]))
        for each, names in places.items()
    ]
    return sorted(joined, key=lambda each: GROUPS.index(each.group))


def as_text(findings: Iterable[Finding]) -> str:
    """Return the report: a section per group, a line per finding, the remedy under what is
    wrong.
    """
    lines, group, found = [], None, merged(findings)
    for each in found:
        if each.group != group:
            lines.append(group := each.group)
        where = f" [{each.where}]" if each.where else ""
        lines.append(f"  {each.level:<8} {each.what}{where}")
        if each.remedy:
            lines.append(f"  {'':<8} → {each.remedy}")
    counts = {level: sum(each.level == level for each in found) for level in (FAILURE, WARNING, OK)}
    summary = ", ".join(
        f"{count} {level}{'s' * (count != 1 and level != OK)}" for level, count in counts.items()
    )
    return "\n".join([*lines, "", summary])


def as_json(findings: Iterable[Finding]) -> str:
    found = merged(findings)
    records = [each._asdict() for each in found]
    return json.dumps({"exit_code": exit_code(found), "findings": records}, indent=2)
