"""`hydra-ray doctor`: what this machine has and lacks for training."""

from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from hydra_ray.cli.output import JsonFlag, say, say_json

if TYPE_CHECKING:
    from hydra_ray.machine import Finding

MARKS = {"ok": "ok  ", "note": "note", "lacking": "LACK"}


def doctor(as_json: JsonFlag = False) -> None:
    """Say what this machine has and lacks; exit code 1 if training cannot run here."""
    from hydra_ray.machine import examine

    findings = examine()
    lacking = [finding.name for finding in findings if finding.state == "lacking"]
    if as_json:
        say_json({"ok": not lacking, "findings": [asdict(finding) for finding in findings]})
    else:
        _print(findings, lacking)
    if lacking:
        raise typer.Exit(1)


def _print(findings: "list[Finding]", lacking: list[str]) -> None:
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"{MARKS[finding.state]}  {finding.name:<{width}}  {finding.value}")
        if finding.remedy:
            say(f"{'':<{width + 8}}{finding.remedy}")
    say()
    say(f"lacking: {', '.join(lacking)}" if lacking else "This machine can train.")
