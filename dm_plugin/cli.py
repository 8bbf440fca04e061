"""dm-plugin: review dumps, compare runs, run A/B arms, ask a running job for probes.

    dm-plugin show RUN            dm-plugin compare A B --fail-above row_sum_pre=2        dm-plugin report RUN -o page.html
    dm-plugin ab examples/ab/tiny.yaml        dm-plugin probe start RUN --steps 50 --layers 17-24        dm-plugin doctor

Exit codes: 0 fine, 1 a threshold was crossed or an arm failed, 2 the input cannot be used. Reviewing needs numpy and the extra `review`,
never torch.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
    from rich.table import Table
except ModuleNotFoundError as missing:  # the entry point exists without the extra
    sys.exit(f"dm-plugin needs {missing.name}, which is not installed; run pip install 'dm-plugin[review]'")

from . import cli_live
from .cli_text import discover, err, finish, fmt, listed, median, number, out, show_table, site_name, span, stop

app = typer.Typer(
    help=__doc__.split("\n")[0], no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
cli_live.register(app)

Dumps = Annotated[
    list[Path], typer.Argument(help="A dump file, a dumps folder, an arm folder or a run folder with arms.")
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Exit 0 although some files were left out.")]


def main() -> None:
    """Entry point of the console script."""
    app()


@app.command()
def show(
    dumps: Dumps,
    site: Annotated[str | None, typer.Option(help="Only sites whose name contains this.")] = None,
    step: Annotated[int | None, typer.Option(help="Only this step; default: all probed steps.")] = None,
    probe: Annotated[
        str | None, typer.Option(help="One probe (row_sum, key_col_sum, ...) or measure (row_sum_pre.p90).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="CSV instead of tables.")] = False,
    skip_bad: SkipBad = False,
) -> None:
    """Print what the dumps hold: one row a layer, medians over the probed steps, every column defined below its table."""
    from .review.collect import collect
    from .review.compare import SHOWN
    from .review.measure import MEASURES, select

    arms, problems = discover(dumps)
    try:
        measures = select(probe) if probe else [MEASURES[k] for k in SHOWN]
    except ValueError as error:
        stop(str(error))
    records: list[dict[str, Any]] = []
    for arm in arms:
        data = collect(arm, measures, steps=None if step is None else (lambda s: s == step))
        problems += data.reader.problems
        if step is not None and not data.first:
            stop(f"{arm.path} has no dump of step {step}; its steps are {listed([f.step for f in arm.files])}")
        sites = [s for s in data.sites if site is None or site in s]
        if site is not None and not sites:
            stop(f"{arm.path} has no site whose name contains {site!r}; it has {', '.join(data.sites[:3])}, ...")
        rows = {m.key: median(data.values[m.key], [data.sites.index(s) for s in sites]) for m in measures}
        records += [
            {"arm": arm.name, "site": s, "steps": len(data.first), **{k: number(v[i]) for k, v in rows.items()}}
            for i, s in enumerate(sites)
        ]
        if not (as_json or as_csv):
            show_table(arm.label, data.backend, data.first, sites, measures, rows)
    if as_json:
        for record in records:
            print(json.dumps(record))
    elif as_csv and records:
        writer = csv.DictWriter(sys.stdout, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    finish(problems, skip_bad)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="The base: a dumps folder or an arm folder.")],
    b: Annotated[Path, typer.Argument(help="What is compared with it.")],
    fail_above: Annotated[
        list[str] | None, typer.Option(help="PROBE=FACTOR: exit 1 if B / A exceeds FACTOR anywhere; may be repeated.")
    ] = None,
) -> None:
    """Compare two runs at the same sites and steps; exit 1 when a threshold is crossed."""
    from .dump import DumpError
    from .review import compare as cmp

    try:
        limits = cmp.thresholds(fail_above or [])
        (arms_a, bad_a), (arms_b, bad_b) = discover([a]), discover([b])
        if len(arms_a) != 1 or len(arms_b) != 1:
            many = a if len(arms_a) != 1 else b
            raise ValueError(f"{many} holds several arms; compare takes one on each side, for example {many}/matched")
        result = cmp.compare(arms_a[0], arms_b[0], cmp.keys_for(limits))
    except (DumpError, ValueError) as error:
        stop(str(error))
    for problem in [*bad_a, *bad_b]:
        err.print(f"[yellow]left out:[/] {problem}")
    out.print(
        f"A: {arms_a[0].label} ({a})\nB: {arms_b[0].label} ({b})\n{len(result.steps)} common steps {span(result.steps)}"
    )
    for key in cmp.keys_for(limits):
        lines = [x for x in result.lines if x.measure.key == key]
        if lines:
            table = Table(
                "site",
                "A",
                "B",
                "B / A",
                title=lines[0].measure.label,
                title_justify="left",
                caption=lines[0].measure.definition,
            )
            for x in sorted(lines, key=lambda x: -x.factor):
                table.add_row(site_name(x.site), fmt(x.a), fmt(x.b), fmt(x.factor))
            out.print(table)
    for name, sites in (("A", result.only_a), ("B", result.only_b)):
        if sites:
            out.print(f"only in {name}: {', '.join(map(site_name, sites))}")
    out.print("A, B: medians over the common steps; B / A: median of each step's own quotient, largest first")
    found = cmp.crossed(result, limits)
    for line, limit in found:
        out.print(
            f"[bold red]crossed[/] {line.measure.key} at {site_name(line.site)}: B / A = {fmt(line.factor)}, allowed {limit:g}"
        )
    if limits and not found:
        out.print(f"no threshold crossed ({', '.join(f'{k} <= {v:g}' for k, v in limits.items())})")
    raise typer.Exit(1 if found else 0)


@app.command()
def report(
    dumps: Dumps,
    output: Annotated[Path, typer.Option("-o", "--output", help="The page to write.")] = Path("page.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    skip_bad: SkipBad = False,
) -> None:
    """Write one self-contained HTML page: no network, opens anywhere."""
    arms, problems = discover(dumps)
    try:
        size = write_report(
            arms, problems, output, title or f"Attention residuals: {', '.join(p.name or str(p) for p in dumps)}"
        )
    except ModuleNotFoundError as error:
        stop(f"report needs {error.name}, which is not installed; run pip install 'dm-plugin[review]'")
    except OSError as error:
        stop(f"{output} cannot be written ({error.strerror}); choose another place with -o")
    out.print(f"wrote {output} ({size / 1024:.0f} KiB, {len(arms)} arm{'s' if len(arms) != 1 else ''})")
    finish(problems, skip_bad)


def write_report(arms: Sequence[Any], problems: list[Any], output: Path, title: str) -> int:
    """Build and write the page, with progress on a terminal; returns its size in bytes."""
    from rich.progress import Progress

    from .review.report import build_payload, render, write_page

    steps = sum(len({f.step for f in arm.files}) for arm in arms)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("reading dumps", total=steps or None)
        payload = build_payload(arms, problems, title=title, tick=lambda: bar.advance(task))
    text = render(payload)
    write_page(output, text)
    return len(text.encode())


@app.command()
def merge(
    dumps: Annotated[Path, typer.Argument(help="A dumps folder with files of many ranks.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder of the merged dumps; new or empty.")],
) -> None:
    """Merge the ranks' files of each step into one; every number of a review stays what it was."""
    from .dump import DumpError, find_dumps
    from .review import tend

    files = find_dumps(dumps)
    if not files:
        stop(f"{dumps} holds no dumps; expected iter_*/rank_*.safetensors")
    try:
        count = tend.merge(files, output)
    except (DumpError, ValueError, OSError) as error:
        stop(str(error))
    out.print(f"merged {len(files)} files of {len({f.rank for f in files})} ranks into {count} in {output}")


@app.command()
def prune(
    dumps: Annotated[Path, typer.Argument(help="A dumps folder.")],
    keep: Annotated[int, typer.Option(help="Keep every N-th probed step, the first and the last.")],
    yes: Annotated[bool, typer.Option("--yes", help="Delete; without it only say what would go.")] = False,
) -> None:
    """Delete probed steps between the ones that are kept."""
    from .dump import DumpError
    from .review import tend

    try:
        gone = tend.surplus(dumps, keep)
        if yes:
            tend.delete(gone)
    except (DumpError, ValueError, OSError) as error:
        stop(str(error))
    out.print(
        f"{'deleted' if yes else 'would delete'} {len(gone)} probed steps{'' if yes or not gone else '; --yes deletes them'}"
    )


@app.command()
def export(
    dumps: Dumps,
    output: Annotated[Path, typer.Option("-o", "--output", help="A .csv or .parquet file.")],
    probe: Annotated[str | None, typer.Option(help="One probe or measure; default: all.")] = None,
) -> None:
    """Write a table of every probed step: one row a step and site, one column a measure."""
    from .dump import DumpError
    from .review import tend
    from .review.measure import select

    arms, problems = discover(dumps)
    try:
        rows = tend.export(arms, select(probe), output)
    except (DumpError, ValueError, OSError) as error:
        stop(str(error))
    out.print(f"wrote {output} ({rows} rows)")
    finish(problems, skip_bad=False)


@app.command()
def ab(
    config: Annotated[Path, typer.Argument(help="YAML with the arms, for example examples/ab/tiny.yaml.")],
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Run folder; default: the config's `out`.")
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Train on this text instead of the config's.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run just this arm; may be repeated.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoints of an interrupted run.")] = False,
) -> None:
    """Train the arms of a comparison, then print the table and write the page."""
    from . import ab as runner

    try:
        code = runner.run(config, out=output, text=text, only=only, resume=resume)
    except (ValueError, OSError) as error:
        stop(str(error))
    raise typer.Exit(code)


@app.command()
def doctor(
    head_dim: Annotated[int, typer.Option(help="Head dim to ask about.")] = 128,
    dtype: Annotated[str, typer.Option(help="Dtype to ask about.")] = "bfloat16",
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
) -> None:
    """Say what is installed and which attention backend would run, or why not."""
    from . import doctor as doc

    findings = [*doc.packages(), *doc.backends(head_dim, dtype)]
    if any(f.what == "torch" and f.ok for f in findings):
        from .integrations.transformer_engine import findings as of_transformer_engine

        findings += of_transformer_engine()
    if as_json:
        print(json.dumps([vars(f) for f in findings], indent=1))
    else:
        table = Table("", "found", title=f"dm_plugin {findings[0].found}", title_justify="left")
        table.add_column("", overflow="fold")
        for f in findings:
            mark = {True: "[green]ok[/]", False: "[red]missing[/]", None: "[yellow]-[/]"}[f.ok]
            table.add_row(f.what, f"{mark} {f.found}", f.remark)
        out.print(table)
    raise typer.Exit(1 if any(f.ok is False for f in findings) else 0)


if __name__ == "__main__":
    main()
