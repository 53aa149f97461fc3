"""The command line: ``kvsem compare | report | explain | doctor``. Needs no Hydra.

What a command needs is imported when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn

from kvsem.errors import KvsemError, SettingError, one_line

if TYPE_CHECKING:
    from rich.console import Console

Command = Callable[[argparse.Namespace], int]

WIDTH = 120  # columns where there is no terminal
COMPARE = """\
Pairs the requests that both runs hold, and gives per arm and key the means of A and B and the
paired difference B - A with its 95 % bootstrap interval (clustered by document). Settings that
differ are listed, with a note where more than one does.

examples:
  kvsem compare runs/a runs/b
  kvsem compare runs/ratio-0.15 runs/ratio-0.3 --arm epic --arm cacheblend
  kvsem compare runs/a runs/b --key quality/kl_first_nats --key cost/flop_ratio --json
"""
REPORT = """\
Writes report.html of run folders anew. With --wandb it makes one W&B Report of them: tables from
the files, panels over the W&B runs that tracking=wandb mirrored into the same project.

examples:
  kvsem report runs/a
  kvsem report --wandb --project kvsem --title "Ratios" runs/ratio-0.15 runs/ratio-0.3
  kvsem report --wandb --dry-run runs/a > report.json    # what would be sent; needs no login
"""
EXPLAIN = """\
What a cache would reuse of one prompt, chunk by chunk: class, tokens, score, reason. Nothing is
computed of the prompt itself unless --recompute names a rule; then it is served, and the table
says what was really recomputed. Of a conversation, the turn before is served first.

The last paragraph of a --prompt file is the question, those ahead of it are passages.

examples:
  kvsem explain --ingest passages.txt --prompt prompt.txt --system system.txt
  kvsem explain --ingest corpus.jsonl --request requests.jsonl:q7 --recompute epic
  kvsem explain --request chat.jsonl --embedder none --json
  printf 'A passage.\\n\\nA question?' | kvsem explain --prompt - --model my-model-folder
"""
DOCTOR = """\
Tries what kvsem needs: versions, FAISS, where the model comes from, what its self-check allows and
why not the rest, a request served with reuse next to exact computation, the books of the memory.
Exits with 1 if something fails; asks for no login and no network.

examples:
  kvsem doctor
  kvsem doctor --model my-model-folder --json
"""


class Parser(argparse.ArgumentParser):
    """Mistakes are one line, like every other of kvsem's."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {' '.join(message.split())} (see {self.prog} --help)\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command: 0, 1 where `doctor` found a fault, 2 for a user's mistake."""
    try:
        args = parser().parse_args(arguments)
        with warnings.catch_warnings():
            warnings.showwarning = _note
            command: Command = args.command
            return command(args)
    except KvsemError as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except SystemExit as stop:  # of argparse
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # `| head` has read enough
        sys.stdout = None
        return 141


def parser() -> argparse.ArgumentParser:
    top = Parser(
        prog="kvsem", description="Reuse of KV, always measured against exact computation."
    )
    top.epilog = (
        "kvsem COMMAND --help shows examples; experiments: python experiments/run.py --help"
    )
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def add(name: str, command: Command, help: str, text: str) -> argparse.ArgumentParser:
        form = argparse.RawDescriptionHelpFormatter
        about, _, examples = text.partition("examples:")
        one = commands.add_parser(
            name, help=help, description=about, epilog=f"examples:{examples}", formatter_class=form
        )
        one.set_defaults(command=command)
        return one

    _compare_options(add("compare", compare, "paired differences of two runs", COMPARE))
    _report_options(add("report", report, "report.html of a run, or a W&B Report", REPORT))
    _explain_options(add("explain", explain, "one prompt against a cache, and why", EXPLAIN))
    doctor_ = add("doctor", doctor, "does everything work here?", DOCTOR)
    _model_option(doctor_)
    _json_option(doctor_)
    return top


def _compare_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("a", metavar="RUN_A", help="folder of a run (the one to compare with)")
    one.add_argument("b", metavar="RUN_B", help="folder of another run")
    one.add_argument("--arm", action="append", default=[], help="only this arm; may be repeated")
    one.add_argument(
        "--key",
        action="append",
        default=[],
        help="only this key (docs/metrics.md); may be repeated; default: those of the report",
    )
    one.add_argument(
        "--anyway", action="store_true", help="also where models or prompts are not the same"
    )
    _json_option(one)


def _report_options(one: argparse.ArgumentParser) -> None:
    one.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run")
    one.add_argument("--wandb", action="store_true", help="a W&B Report (extra: kvsem[report])")
    one.add_argument("--project", default="kvsem", help="W&B project (default: %(default)s)")
    one.add_argument("--entity", help="W&B user or team (default: the user's own)")
    one.add_argument("--title", help="of the W&B Report")
    one.add_argument("--dry-run", action="store_true", help="print it as JSON, send nothing")


def _explain_options(one: argparse.ArgumentParser) -> None:
    what = one.add_mutually_exclusive_group(required=True)
    what.add_argument("--prompt", metavar="FILE", help="text of a prompt; - reads standard input")
    what.add_argument(
        "--request",
        metavar="FILE.jsonl[:ID]",
        help="a record as of workload=jsonl (default: the file's first); of a conversation its "
        "last turn, or ID/turn-1",
    )
    one.add_argument("--system", metavar="FILE", help="system prompt of --prompt")
    one.add_argument(
        "--ingest",
        metavar="FILE",
        action="append",
        default=[],
        help="what the cache holds: .jsonl records, or text with a passage a paragraph",
    )
    _model_option(one)
    one.add_argument(
        "--embedder",
        choices=("minilm", "hashing", "none"),
        default="minilm",
        help="finds similar chunks; none: identical content only (default: %(default)s)",
    )
    one.add_argument(
        "--min-score", type=float, default=0.75, help="cosine that a similar chunk needs"
    )
    one.add_argument(
        "--chunker",
        choices=("segment", "sentence", "markdown", "code", "dialogue", "fixed"),
        default="segment",
    )
    one.add_argument(
        "--recompute",
        choices=("none", "epic", "cacheblend", "krige", "all"),
        help="serve the prompt under this rule, to see what is recomputed",
    )
    one.add_argument(
        "--ratio", type=float, default=0.15, help="of that rule (default: %(default)s)"
    )
    _json_option(one)


def _model_option(one: argparse.ArgumentParser) -> None:
    one.add_argument(
        "--model",
        default="smollm2",
        help="a packaged model (smollm2, gemma3_270m), a folder, or a name of the hub "
        "(default: %(default)s)",
    )


def _json_option(one: argparse.ArgumentParser) -> None:
    one.add_argument("--json", action="store_true", help="for machines")


# Commands -------------------------------------------------------------------------------------


def compare(args: argparse.Namespace) -> int:
    from kvsem.compare import compare, read, tables

    a, b = read(args.a), read(args.b)
    found = compare(a, b, args.arm, args.key, args.anyway)
    if args.json:
        _print_json(asdict(found))
        return 0
    console = _console()
    console.print(f"A: {found.a}\nB: {found.b}", soft_wrap=True, highlight=False)
    for table in tables(found):
        console.print()
        console.print(table)
    same = ", ".join(name for name in found.equal if name not in found.differ)
    console.print(f"\nequal in every arm: {same or 'nothing'}", highlight=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False)
    return 0


def report(args: argparse.Namespace) -> int:
    if args.wandb:
        return _wandb_report(args)
    if args.dry_run or args.entity or args.title:
        raise SettingError("--wandb", False, "given: --dry-run, --entity and --title belong to it")
    from kvsem.report import write_report

    for run in args.runs:
        print(write_report(run))
    return 0


def _wandb_report(args: argparse.Namespace) -> int:
    from kvsem.results import load_run
    from kvsem.wandb_report import build, check_key, send, specification

    runs = [load_run(run) for run in args.runs]
    if args.dry_run:
        _print_json(specification(build(runs, args.project, args.entity or "", args.title)))
        return 0
    check_key()
    print(send(build(runs, args.project, args.entity, args.title)))
    return 0


def explain(args: argparse.Namespace) -> int:
    from kvsem import explain as explained
    from kvsem import inputs

    if args.request:
        if args.system:
            raise SettingError("--system", args.system, "left out: a record has its own")
        request = inputs.read_request(args.request)
    else:
        system = inputs.read_text(args.system).strip() if args.system else None
        text = sys.stdin.read() if args.prompt == "-" else inputs.read_text(args.prompt)
        request = inputs.prompt_request(text, system)
    ingest = [item for path in args.ingest for item in inputs.read_ingest(path)]
    rule = args.recompute or "none"
    with redirect_stdout(sys.stderr):  # some libraries greet
        _, lm = inputs.load_model(args.model)
        engine = inputs.make_engine(
            lm, args.embedder, args.chunker, rule, args.ratio, args.min_score
        )
        explained.warm(engine, request, ingest)
        found = explained.explain(engine, request, serve=args.recompute is not None)
    if args.json:
        _print_json(asdict(found))
        return 0
    console = _console()
    console.print(explained.table(found))
    for sentence in explained.sentences(found):
        console.print(sentence, highlight=False, markup=False)
    return 0


def doctor(args: argparse.Namespace) -> int:
    from kvsem.doctor import examine, table

    with redirect_stdout(sys.stderr):  # some libraries greet
        checks = list(examine(args.model))
    if args.json:
        _print_json([asdict(check) for check in checks])
    else:
        _console().print(table(checks))
    return int(any(check.state == "failed" for check in checks))


def _console() -> Console:
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    return console


def _print_json(value: Any) -> None:
    print(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def _note(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"note: {message}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
