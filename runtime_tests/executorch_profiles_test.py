"""Programs for Core ML's, Vulkan's and Metal's delegates: lowered here, run on devices only."""

import shutil

import pytest

pytest.importorskip("executorch.exir")
from pit_deploy import export
from pit_deploy.bundle import Bundle
from pit_deploy.errors import InputError
from pit_deploy.runtimes import open_runtime, open_text_runtime


def exported(source, out, profile):
    """The export's note of what went where."""
    report = export(source, out, to="executorch", weights="fp32", profile=profile, context=64)
    (note,) = [note for note in report.notes if note.startswith(profile)]
    return note


def refused(bundle, profile):
    """On this machine no delegate of the kind is there, which is said before anything runs."""
    backend = {"coreml": "CoreMLBackend", "mps": "MPSBackend", "vulkan": "VulkanBackend"}[profile]
    for opened in (open_runtime, lambda b: open_text_runtime(b, "executorch-runner")):
        with pytest.raises(
            InputError, match=f"lowered for {backend}, and ExecuTorch .* has .*XnnpackBackend"
        ):
            opened(Bundle.open(bundle))


def test_core_ml_takes_the_whole_decoder_in_float32(make_checkpoint, tmp_path, monkeypatch):
    """Its default is float16, in which the square of a large activation in a norm overflows."""
    pytest.importorskip("coremltools")
    from executorch.backends.apple.coreml.compiler import coreml_preprocess

    from pit_deploy.runtimes.mil_program import load_spec

    flatten = coreml_preprocess.executorchcoreml.flatten_directory_contents
    packages = []

    def kept(directory):
        packages.append(tmp_path / f"package{len(packages)}")
        shutil.copytree(directory, packages[-1])
        return flatten(directory)

    monkeypatch.setattr(coreml_preprocess.executorchcoreml, "flatten_directory_contents", kept)
    note = exported(make_checkpoint(), tmp_path / "bundle", "coreml")
    assert note == "coreml: 1 delegates; operators left to portable kernels: none"
    refused(tmp_path / "bundle", "coreml")
    (package,) = packages
    (function,) = load_spec(package / "model.mlpackage").mlProgram.functions.values()
    (block,) = function.block_specializations.values()
    types = {}
    for operation in block.operations:
        for output in operation.outputs:
            types.setdefault(operation.type, set()).add(output.type.tensorType.dataType)
    float32 = 11  # of coremltools' DataType
    norms = [kind for kind in ("rsqrt", "reduce_mean") if kind in types]
    assert len(norms) == 2 and all(types[kind] == {float32} for kind in (*norms, "matmul"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("profile", "left"),
    [
        ("mps", {"aten::copy_"}),
        ("vulkan", {"aten::arange", "aten::copy_", "aten::index", "aten::index_put", "aten::sym_size"}),
    ],
)
def test_other_delegates_take_all_but_the_cache_and_the_positions(
    make_checkpoint, tmp_path, capfd, profile, left
):
    note = exported(make_checkpoint(), tmp_path / "bundle", profile)
    assert capfd.readouterr().out == ""  # a partitioner prints its graph, where --json writes
    listed = note.split("portable kernels: ")[1].split(", ")
    assert {name.split(" ")[0].split(".")[0] for name in listed} == left
    refused(tmp_path / "bundle", profile)
