"""dm-plugin: review dumps, compare runs, run A/B arms, ask a running job for probes.

    dm-plugin show RUN            dm-plugin compare A B --fail-above row_sum_pre=2        dm-plugin report RUN -o page.html
    dm-plugin ab examples/ab/tiny.yaml        dm-plugin probe start RUN --steps 50 --layers 17-24        dm-plugin doctor

Exit codes: 0 fine, 1 a threshold was crossed or an arm failed, 2 the input cannot be used. Reviewing needs numpy and the extra `review`,
never torch.
"""

from __future__ import annotations

import csv
import json
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

try:
    import typer
    from rich.console import Console
    from rich.table import Table
except ModuleNotFoundError as missing:  # the entry point exists without the extra
    sys.exit(f"dm-plugin needs {missing.name}, which is not installed; run pip install 'dm-plugin[review]'")

app = typer.Typer(
    help=__doc__.split("\n")[0], no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
probe_app = typer.Typer(help="Start, stop or look at the probes of a running job.", no_args_is_help=True)
app.add_typer(probe_app, name="probe")
out = Console(highlight=False)
err = Console(stderr=True, highlight=False)

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

    arms, problems = _discover(dumps)
    try:
        measures = select(probe) if probe else [MEASURES[k] for k in SHOWN]
    except ValueError as error:
        _stop(str(error))
    records: list[dict[str, Any]] = []
    for arm in arms:
        data = collect(arm, measures, steps=None if step is None else (lambda s: s == step))
        problems += data.reader.problems
        if step is not None and not data.first:
            _stop(f"{arm.path} has no dump of step {step}; its steps are {_listed([f.step for f in arm.files])}")
        sites = [s for s in data.sites if site is None or site in s]
        if site is not None and not sites:
            _stop(f"{arm.path} has no site whose name contains {site!r}; it has {', '.join(data.sites[:3])}, ...")
        rows = {m.key: _median(data.values[m.key], [data.sites.index(s) for s in sites]) for m in measures}
        records += [
            {"arm": arm.name, "site": s, "steps": len(data.first), **{k: _number(v[i]) for k, v in rows.items()}}
            for i, s in enumerate(sites)
        ]
        if not (as_json or as_csv):
            _show_table(arm.label, data.backend, data.first, sites, measures, rows)
    if as_json:
        for record in records:
            print(json.dumps(record))
    elif as_csv and records:
        writer = csv.DictWriter(sys.stdout, list(records[0]))
        writer.writeheader()
        writer.writerows(records)
    _finish(problems, skip_bad)


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
        (arms_a, bad_a), (arms_b, bad_b) = _discover([a]), _discover([b])
        if len(arms_a) != 1 or len(arms_b) != 1:
            many = a if len(arms_a) != 1 else b
            raise ValueError(f"{many} holds several arms; compare takes one on each side, for example {many}/matched")
        result = cmp.compare(arms_a[0], arms_b[0], cmp.keys_for(limits))
    except (DumpError, ValueError) as error:
        _stop(str(error))
    for problem in [*bad_a, *bad_b]:
        err.print(f"[yellow]left out:[/] {problem}")
    out.print(
        f"A: {arms_a[0].label} ({a})\nB: {arms_b[0].label} ({b})\n{len(result.steps)} common steps {_span(result.steps)}"
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
                table.add_row(_site(x.site), _fmt(x.a), _fmt(x.b), _fmt(x.factor))
            out.print(table)
    for name, sites in (("A", result.only_a), ("B", result.only_b)):
        if sites:
            out.print(f"only in {name}: {', '.join(map(_site, sites))}")
    out.print("A, B: medians over the common steps; B / A: median of each step's own quotient, largest first")
    found = cmp.crossed(result, limits)
    for line, limit in found:
        out.print(
            f"[bold red]crossed[/] {line.measure.key} at {_site(line.site)}: B / A = {_fmt(line.factor)}, allowed {limit:g}"
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
    arms, problems = _discover(dumps)
    try:
        size = write_report(
            arms, problems, output, title or f"Attention residuals: {', '.join(p.name or str(p) for p in dumps)}"
        )
    except ModuleNotFoundError as error:
        _stop(f"report needs {error.name}, which is not installed; run pip install 'dm-plugin[review]'")
    except OSError as error:
        _stop(f"{output} cannot be written ({error.strerror}); choose another place with -o")
    out.print(f"wrote {output} ({size / 1024:.0f} KiB, {len(arms)} arm{'s' if len(arms) != 1 else ''})")
    _finish(problems, skip_bad)


@app.command()
def watch(
    run: Annotated[Path, typer.Argument(help="A dumps folder, an arm folder or a run folder that is being written.")],
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1; 0: any free one.")] = 8734,
    every: Annotated[float, typer.Option(help="Seconds between looks for new dumps.")] = 5.0,
) -> None:
    """Serve the report of a running job on this machine, built again as dumps land. Ctrl-C ends it."""
    from .review import serve
    from .review.report import build_payload, render
    from .review.runs import discover

    if not run.is_dir():
        _stop(f"{run} is not a folder; give the run folder of the job")

    def build() -> str:
        problems: list[Any] = []
        return render(build_payload(discover([run], problems), problems, title=f"Live: {run.name or run}"))

    try:
        server = serve.server(run, build, port, every)
    except OSError as error:
        _stop(f"port {port} cannot be used ({error.strerror}); choose another with --port")
    out.print(f"watching {run} at http://127.0.0.1:{server.server_address[1]}/ (Ctrl-C ends it)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        server.server_close()


@app.command()
def alert(
    run: Annotated[Path, typer.Argument(help="A dumps folder, an arm folder or a run folder that is being written.")],
    above: Annotated[
        list[str] | None,
        typer.Option(help="MEASURE=VALUE; may be repeated. Default: row_sum_pre=1e-3, key_col_sum=1e-2."),
    ] = None,
    alert_cmd: Annotated[
        str | None,
        typer.Option(
            help="Shell command to run for each new crossing, with DM_SITE, DM_VALUE, ... in its environment."
        ),
    ] = None,
    every: Annotated[float | None, typer.Option(help="Look again every so many seconds; default: look once.")] = None,
) -> None:
    """Say which layers are past a line at the newest probed step; exit 1 if any is (looking once)."""
    import time

    from .dump import DumpError
    from .review import alert as alarm

    told: set[tuple[str, str, str]] = set()
    try:
        limits = alarm.lines(above or [])
        while True:
            found = alarm.crossings(run, limits)
            for c in found:
                if (c.arm, c.site, c.measure) in told:
                    continue
                told.add((c.arm, c.site, c.measure))
                out.print(
                    f"[bold red]above[/] {c.arm}: {_site(c.site)} at step {c.step}: {c.measure} = {_fmt(c.value)}, line {c.limit:g}"
                )
                if alert_cmd is not None and (code := alarm.tell(alert_cmd, c)) != 0:
                    err.print(f"the alert command ended with exit code {code}")
            if every is None:
                break
            time.sleep(every)
    except (ValueError, DumpError) as error:
        _stop(str(error))
    except KeyboardInterrupt:
        raise typer.Exit(1 if told else 0) from None
    if not found:
        out.print("no layer is past a line")
    raise typer.Exit(1 if found else 0)


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
        _stop(f"{dumps} holds no dumps; expected iter_*/rank_*.safetensors")
    try:
        count = tend.merge(files, output)
    except (DumpError, ValueError, OSError) as error:
        _stop(str(error))
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
        _stop(str(error))
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

    arms, problems = _discover(dumps)
    try:
        rows = tend.export(arms, select(probe), output)
    except (DumpError, ValueError, OSError) as error:
        _stop(str(error))
    out.print(f"wrote {output} ({rows} rows)")
    _finish(problems, skip_bad=False)


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
        _stop(str(error))
    raise typer.Exit(code)


@app.command()
def replay(
    captures: Annotated[list[Path], typer.Argument(help="A dumps folder, its captures folder, or a capture file.")],
    as_json: Annotated[bool, typer.Option("--json", help="JSON lines instead of tables.")] = False,
) -> None:
    """Replay captured operands: what stale, consistent, matched and stock would have given. Needs torch."""
    try:
        from .replay import ARMS, load
        from .replay import replay as run
    except ModuleNotFoundError as error:
        _stop(f"replay needs {error.name}, which is not installed")
    import numpy as np

    from .dump import DumpError, find_dumps
    from .review.measure import MEASURES

    shown = ("median", "gap", "col", "dq", "dk", "dv")
    files = []
    for path in captures:
        folder = path / "captures" if (path / "captures").is_dir() else path
        files += [f.path for f in find_dumps(folder)] if folder.is_dir() else [path]
    if not files:
        _stop(f"{captures[0]} holds no captures; ask a job for them with `dm-plugin probe start RUN --replay`")
    for file in files:
        try:
            metadata, found = load(file)
        except DumpError as error:
            _stop(str(error))
        for site, capture in found.items():
            fields = {key: np.asarray(x)[None] for key, x in run(capture).items()}
            rows = {arm: [float(MEASURES[f"replay_{arm}.{m}"].form(fields)[0]) for m in shown] for arm in ARMS}
            if as_json:
                for arm, values in rows.items():
                    numbers = dict(zip(shown, map(_number, values), strict=True))
                    print(json.dumps({"file": str(file), "site": site, "arm": arm, **numbers}))
                continue
            ran = metadata.get("dm_plugin.backend", "")
            title = (
                f"{_site(site)}, step {metadata['dm_plugin.step']}, {tuple(capture.q.shape)} of a job that ran {ran}"
            )
            table = Table(
                "arm",
                "row",
                "delta gap",
                "key column",
                "dQ error",
                "dK error",
                "dV error",
                title=title,
                title_justify="left",
            )
            for arm, values in rows.items():
                table.add_row(arm, *map(_fmt, values))
            out.print(table)
    if not as_json:
        for m in shown:
            out.print(f"  {MEASURES[f'replay_stale.{m}'].definition}", soft_wrap=True)


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


# ------------------------------------------------------------------------------------------------ probe
Run = Annotated[Path, typer.Argument(help="The running job's control folder (where its probe_request.json goes).")]


@probe_app.command("start")
def probe_start(
    run: Run,
    steps: Annotated[int | None, typer.Option(help="How many steps; default: until stopped.")] = None,
    start_step: Annotated[int | None, typer.Option(help="First step; default: the next one each rank reaches.")] = None,
    layers: Annotated[str | None, typer.Option(help="Global layer numbers from 0, like 0-3,17; default: all.")] = None,
    probes: Annotated[str | None, typer.Option(help="Comma-separated probes; default: all but replay.")] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also capture operands and replay them through every delta.")
    ] = False,
) -> None:
    """Ask the job to probe its next steps."""
    wanted = [p.strip() for p in probes.split(",")] if probes else None
    if replay:
        from .config import ON_REQUEST, PROBES

        wanted = [*(wanted or PROBES), *(p for p in ON_REQUEST if p not in (wanted or ()))]
    _send(run, "start", steps=steps, start_step=start_step, layers=layers, probes=wanted)


@probe_app.command("stop")
def probe_stop(run: Run) -> None:
    """Ask the job to stop probing."""
    _send(run, "stop")


@probe_app.command("status")
def probe_status(run: Run) -> None:
    """Show the request and what each rank made of it."""
    from . import control

    if not run.is_dir():
        _stop(f"{run} is not a folder; give the control folder of the running job")
    request, ranks = control.status(run)
    out.print(f"request: {json.dumps(request) if request else 'none'}")
    table = Table("rank", "state", "at step", "request", "queued", "written", "lost")
    for r in ranks:
        table.add_row(*(str(r.get(k)) for k in ("rank", "state", "step", "request", "queued", "written", "lost")))
    out.print(
        table if ranks else "no rank has reported yet: a job looks at the start of its next step, a finished one never"
    )


def _send(run: Path, action: str, **options: Any) -> None:
    from . import control

    if not run.is_dir():
        _stop(f"{run} is not a folder; give the control folder of the running job")
    try:
        request = control.send(run, action, **options)
    except ValueError as error:
        _stop(str(error))
    except OSError as error:
        _stop(f"{run} cannot be written ({error.strerror}); the job was not asked")
    out.print(f"asked the job in {run} to {action} (request {request.id}); ranks look at the start of their next step")


# ------------------------------------------------------------------------------------------------ helpers
def _discover(paths: Sequence[Path]) -> tuple[list[Any], list[Any]]:
    from .dump import DumpError
    from .review.runs import discover

    problems: list[Any] = []
    try:
        return discover(paths, problems), problems
    except DumpError as error:
        _stop(str(error))


def _stop(text: str) -> NoReturn:
    err.print(f"dm-plugin: {text}", soft_wrap=True, markup=False)
    raise typer.Exit(2)


def _finish(problems: Sequence[Any], skip_bad: bool) -> None:
    for problem in problems:
        err.print(f"left out: {problem}", soft_wrap=True, markup=False)
    if problems and not skip_bad:
        raise typer.Exit(2)


def _show_table(
    label: str, backend: str, steps: list[int], sites: list[str], measures: Sequence[Any], rows: dict[str, list[float]]
) -> None:
    kept = [m for m in measures if any(math.isfinite(x) for x in rows[m.key])]
    title = f"{label}: {backend or 'backend not stated'}, {len(steps)} probed steps {_span(steps)}"
    for part in _that_fit(kept, max((len(_site(site)) for site in sites), default=4), rows):
        table = Table("site", title=title, title_justify="left")
        for m in part:
            table.add_column(m.label, no_wrap=False, min_width=_digits(rows[m.key]))
        for i, site in enumerate(sites):
            table.add_row(_site(site), *(_fmt(rows[m.key][i]) for m in part))
        out.print(table)
        title = ""
    for m in kept:
        out.print(f"  [bold]{m.label}[/]: median over steps of {m.definition}", soft_wrap=True)


def _digits(values: Sequence[float]) -> int:
    return max((len(_fmt(x)) for x in values), default=1)


def _that_fit(measures: Sequence[Any], first: int, rows: dict[str, list[float]]) -> list[list[Any]]:
    """Measures in groups whose tables fit the terminal: a number that is cut off is worse than a second table."""
    groups: list[list[Any]] = [[]]
    room = out.width - first - 4
    for m in measures:
        width = 3 + max(_digits(rows[m.key]), *(len(word) for word in m.label.split()))
        if groups[-1] and width > room:
            groups.append([])
            room = out.width - first - 4
        groups[-1].append(m)
        room -= width
    return groups


def _median(values: Any, columns: list[int]) -> list[float]:
    import numpy as np

    picked = values[:, columns]
    return [float(np.median(c[np.isfinite(c)])) if np.isfinite(c).any() else math.nan for c in picked.T]


def _number(x: float) -> float | None:
    return float(f"{x:.6g}") if math.isfinite(x) else None


def _fmt(x: float) -> str:
    if not math.isfinite(x):
        return "-" if math.isnan(x) else "inf"
    return "0" if x == 0 else f"{x:.2e}" if abs(x) < 1e-2 or abs(x) >= 1e5 else f"{x:.3g}"


def _span(steps: Iterable[int]) -> str:
    known = sorted(set(steps))
    return f"{known[0]}-{known[-1]}" if known else "none"


def _listed(steps: Iterable[int]) -> str:
    """All of a few steps; of many, the first, the last and their number."""
    known = sorted(set(steps))
    return (
        ", ".join(map(str, known)) if len(known) <= 12 else f"{known[0]}, {known[1]}, ..., {known[-1]} ({len(known)})"
    )


def _site(name: str) -> str:
    from .review.verdict import short_site

    return short_site(name)


if __name__ == "__main__":
    main()
