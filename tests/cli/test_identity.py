"""`cudflash identity` and `--identity`: what is stamped, and what is refused in which words."""

import json

import pytest

from tests.cli.pairs import put_directory, put_draft, put_target

CONTEXT = ("-c", 256, "-t", 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A target, two drafts that fit it, and a draft that does not."""
    folder = tmp_path_factory.mktemp("identity")
    put_target(folder)
    put_draft(folder)
    put_directory(folder)
    put_directory(folder, "v1-qwen3-full", "other")
    return folder


@pytest.fixture
def stamped(cli, folder, tmp_path):
    """(path, content) of the identity of the model with the draft in the directory."""
    path = tmp_path / "id.json"
    assert cli("identity", folder / "model.gguf", folder / "draft", "-o", path).code == 0
    return path, json.loads(path.read_text())


def generate(cli, folder, path, *args, draft="draft"):
    """An answer of one token under an identity."""
    pair = ("--draft", folder / draft) if draft else ()
    return cli("generate", folder / "model.gguf", *pair, "--identity", path, "-p", "hello", "-n", 1,
               *CONTEXT, *args)  # fmt: skip


def test_file_holds_what_makes_the_pair(cli, folder, stamped):
    """A field that is left out, so that it can differ without a word."""
    from cudflash.loader.summary import file_digest

    path, identity = stamped
    assert identity["target_sha256"] == file_digest(folder / "model.gguf")
    shown = {name: identity[name] for name in ("taps", "block_size", "mask_token_id", "draft_kind")}
    assert shown == {
        "taps": [0, 1, 2, 3, 4], "block_size": 16, "mask_token_id": 351, "draft_kind": "dflash",
    }  # fmt: skip
    assert (identity["context_layers"], identity["context_sink"]) == (5, 64)
    assert (identity["context_window"], identity["context_elements_per_token"]) == (32, 64)
    # five layers of 64 + 32 rows, keys and values of 64 elements, 4 bytes each
    assert identity["context_byte_limit"] == 5 * (64 + 32) * 2 * 64 * 4
    done = cli("identity", folder / "model.gguf", folder / "draft", "--json")
    assert done.code == 0 and done.json == identity


def test_the_same_pair_passes(cli, folder, stamped):
    """An identity that refuses the pair it was made of; its context has no part in it here."""
    path, _ = stamped
    assert generate(cli, folder, path).code == 0
    assert generate(cli, folder, path, "-c", 300, "--kv-type", "f32").code == 0
    done = cli("verify", folder / "model.gguf", folder / "draft", "--identity", path, "-p", "hello",
               "-n", 4, "--no-scripted", *CONTEXT)  # fmt: skip
    assert done.code == 0


@pytest.mark.parametrize(
    "field, value",
    [("taps", [0, 1, 2, 4, 3]), ("block_size", 8), ("mask_token_id", 0), ("context_window", None),
     ("context_sink", 0), ("target_sha256", "0" * 64), ("numerics", "0"), ("draft_kind", "dflash2")],
)  # fmt: skip
def test_every_difference_names_field_expected_and_found(cli, folder, stamped, field, value):
    """ "It does not fit", and nobody knows what."""
    path, identity = stamped
    path.write_text(json.dumps({**identity, field: value}))
    for done in (
        generate(cli, folder, path),
        cli("verify", folder / "model.gguf", folder / "draft", "--identity", path, *CONTEXT),
        cli("chat", folder / "model.gguf", "-md", folder / "draft", "--identity", path, *CONTEXT),
    ):
        assert done.code == 4 and str(path) in done.sentence and done.out == b""
        assert f"{field} differs, expected {json.dumps(value)} (the file)" in done.sentence
        assert f"found {json.dumps(identity[field])} (this pair)" in done.sentence


def test_fields_too_few_or_too_many_are_differences(cli, folder, stamped):
    """A missing field taken from a default of the reader."""
    path, identity = stamped
    path.write_text(json.dumps({k: v for k, v in identity.items() if k != "context_sink"}))
    done = generate(cli, folder, path)
    assert done.code == 4 and "context_sink differs, expected nothing" in done.sentence
    path.write_text(json.dumps({**identity, "context_slack": 3}))
    done = generate(cli, folder, path)
    assert done.code == 4 and "context_slack differs, expected 3" in done.sentence


@pytest.mark.parametrize(
    "args, field",
    [
        (("--activations", "int8"), "activations"),
        (("--draft-window", 64), "context_window"),
        (("--draft-sink", 0), "context_sink"),
        (("--draft-activations", "int8x2"), "draft_activations"),
    ],
)
def test_other_settings_are_refused(cli, folder, stamped, args, field):
    """Another conditioning of the draft under the identity of the stamped one."""
    done = generate(cli, folder, stamped[0], *args)
    assert done.code == 4 and f"{field} differs" in done.sentence


def test_other_files_are_refused(cli, folder, stamped):
    """Another draft that fits the same target, or none at all."""
    done = generate(cli, folder, stamped[0], draft="draft.gguf")
    assert done.code == 4 and "draft_sha256 differs" in done.sentence
    none = generate(cli, folder, stamped[0], "--no-draft", draft=None)
    assert none.code == 2 and "no draft was given" in none.sentence


def test_context_counts_where_a_layer_sees_all_of_it(cli, folder, tmp_path):
    """A full layer's context that differs between two machines."""
    path = tmp_path / "id.json"
    made = cli("identity", folder / "model.gguf", folder / "draft.gguf", "-o", path, "-c", 256)
    assert made.code == 0
    assert generate(cli, folder, path, draft="draft.gguf").code == 0
    done = generate(cli, folder, path, "-c", 128, draft="draft.gguf")
    assert done.code == 4 and "context_n_ctx differs, expected 256" in done.sentence


@pytest.mark.parametrize(
    "text, code, words",
    [("{", 3, "not JSON"), ("[]", 3, "schema"), ('{"schema": "x"}', 3, "schema is 'x'"),
     (None, 2, "cannot be read")],
)  # fmt: skip
def test_files_that_are_no_identity(cli, folder, tmp_path, text, code, words):
    """A file of something else that passes for an identity."""
    path = tmp_path / "id.json"
    if text is not None:
        path.write_text(text)
    done = generate(cli, folder, path)
    assert done.code == code and words in done.sentence and str(path) in done.sentence


@pytest.mark.parametrize(
    "files, args, code, words",
    [
        (("model.gguf", "draft"), (), 2, "-o FILE"),
        (("model.gguf", "draft"), ("-o", "no/such/folder/id.json"), 2, "cannot be written"),
        (("model.gguf",), ("--json",), 2, "needs a draft"),
        (("model.gguf", "other"), ("--json",), 4, "does not belong"),
        (("model.gguf", "model.gguf"), ("--json",), 2, "this is a target"),
        (("draft.gguf", "draft"), ("--json",), 2, "this is a draft"),
        (("missing", "draft"), ("--json",), 3, "missing"),
        (("model.gguf", "missing"), ("--json",), 3, "missing"),
    ],
)
def test_wrong_arguments_are_one_sentence(cli, folder, files, args, code, words):
    """An identity of a pair that cannot run."""
    done = cli("identity", *(folder / name for name in files), *args)
    assert done.code == code and words in done.sentence
    if "--json" in args:
        assert done.json["error"]["exit_code"] == code and done.out.count(b"\n") == 1
    else:
        assert done.out == b""


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_settings_of_an_identity_can_be_named_everywhere(cli, folder, tmp_path, command):
    """An identity that no command but generate can be shown, because settings cannot be given."""
    path, pair = tmp_path / "id.json", (folder / "model.gguf", folder / "draft")
    settings = ("--draft-activations", "int8x2", "--activations", "int8", "--draft-sink", 8,
                "--draft-window", 16)  # fmt: skip
    assert cli("identity", *pair, *settings, "-o", path).code == 0
    given = (pair[0], "-md", pair[1]) if command == "plan" else pair
    assert cli(command, *given, "--identity", path, *settings).code == 0
    for at in range(0, len(settings), 2):
        left = settings[:at] + settings[at + 2 :]
        assert cli(command, *given, "--identity", path, *left).code == 4, settings[at]
    if command == "inspect":
        done = cli(command, *given, "--draft-sink", 8)
        assert done.code == 2 and "--draft-sink matters with --identity alone" in done.sentence


def test_an_identity_of_an_older_kind_is_to_be_made_again(cli, folder, stamped):
    """A file that lacks a field and is called another pair's."""
    path, identity = stamped
    path.write_text(json.dumps({**identity, "schema": "cudflash-identity/1"}))
    done = generate(cli, folder, path)
    assert done.code == 3 and "make the file again" in done.sentence


@pytest.mark.parametrize("command", ["plan", "inspect"])
def test_commands_that_load_nothing_refuse_another_pair_too(cli, folder, stamped, command):
    """A plan or a description of a pair that the identity was not made of."""
    path, _ = stamped

    def run(draft):
        pair = ("-md", folder / draft) if command == "plan" else (folder / draft,)
        return cli(command, folder / "model.gguf", *pair, "--identity", path)

    assert run("draft").code == 0
    other = run("other")
    assert other.code == 4 and not other.out
    changed = json.loads(path.read_text()) | {"context_sink": 7}
    path.write_text(json.dumps(changed))
    refused = run("draft")
    assert refused.code == 4 and "context_sink" in refused.err and "7" in refused.err
