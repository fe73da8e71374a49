"""The parts of the documentation that are made from the code."""

from pathlib import Path

from spesd.swarm.round import TABLE

ROOT = Path(__file__).parents[2]
BEGIN, END = "<!-- round table -->\n", "<!-- end of round table -->"


def round_table() -> str:
    """Return the transition table as Markdown: what each phase does with each event."""
    phases = list(dict.fromkeys(phase for phase, _ in TABLE))
    lines = ["| phase | event: what it leads to |", "|---|---|"]
    for phase in phases:
        rows = [
            f"{event.__name__}: `{method.lstrip('_')}`"
            for (at, event), method in TABLE.items()
            if at is phase and method != "_ignore"
        ]
        lines.append(f"| {phase} | {', '.join(rows)} |")
    return "\n".join(lines) + "\n"


def with_table(text: str) -> str:
    """Return ARCHITECTURE.md with the table as the code has it."""
    before, rest = text.split(BEGIN)
    return before + BEGIN + round_table() + END + rest.split(END)[1]


if __name__ == "__main__":
    page = ROOT / "ARCHITECTURE.md"
    page.write_text(with_table(page.read_text()))
