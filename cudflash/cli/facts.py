"""Facts about a target or a draft as rows of a table: what ``inspect`` shows people.

Owns the wording. Must not read files: it is given the dictionaries that ``--json`` prints.
"""

from cudflash.cli.output import human_bytes


def file_facts(found):
    """Rows about a GGUF file from ``loader.summary.summarize``."""
    rows = [
        ("file", found["path"]),
        ("name", found["name"]),
        ("architecture", found["architecture"]),
        ("role", found["role"]),
        ("size", f"{human_bytes(found['file_bytes'])} ({found['file_bytes']} bytes)"),
        ("GGUF version", found["gguf_version"]),
        ("tensors", found["n_tensors"]),
        ("sha256", found.get("sha256")),
    ]
    model, draft = found["model"], found["draft"]
    if model:
        rows += _model_facts(model)
    elif draft is None or draft["config"] is None:
        rows += sorted(found["hyperparameters"].items())
    token = found["tokenizer"]
    ids = ", ".join(f"{name} {ident}" for name, ident in token["special_ids"].items())
    rows += [
        ("tokenizer", " / ".join(str(token[k]) for k in ("model", "pre") if token[k])),
        ("vocabulary", token["vocab_size"]),
        ("special ids", ids),
        ("chat template", "yes" if token["chat_template"] else "no"),
        ("can be run", "yes" if found["problem"] is None else f"no: {found['problem']}"),
    ]
    if draft is not None:
        problem = draft["problem"]
        rows.append(("can draft", "yes" if problem is None else f"no: {problem}"))
    return _shown(rows)


def directory_facts(found):
    """Rows about a draft in a directory."""
    rows = [
        ("directory", found["path"]),
        ("name", found["name"]),
        ("role", found["role"]),
        ("files", len(found["draft"]["files"])),
        ("size", f"{human_bytes(found['file_bytes'])} ({found['file_bytes']} bytes)"),
        ("tensors", found["n_tensors"]),
        ("sha256", found.get("sha256")),
    ]
    return _shown(rows)


def draft_facts(config, lane):
    """Rows about a draft's configuration, each value that has a source with it.

    Parameters
    ----------
    config : dict
        From ``loader.draft_config.describe_draft_config``.
    lane : str
        From ``loader.pairing.lane_sentence``.
    """
    taps = ", ".join(map(str, config["taps"]))
    window = "none" if config["window"] is None else f"{config['window']} rows"
    pattern = "" if config["window"] is None else f" on S of {config['window_pattern']}"
    sink = f"{config['sink']} rows" if config["sink"] else "none"
    stated = config["n_target_layers"]
    rows = [
        ("kind", _kind(config)),
        ("geometry", lane),
        ("taps", f"{taps} (0-based) [{config['taps_source']}]"),
        ("for target layers", "not stated" if stated is None else stated),
        ("window", f"{window}{pattern} [{config['window_source']}]"),
        ("sink", f"{sink} [{config['sink_source']}]"),
        ("block", f"{config['block_size']} rows [{config['block_size_source']}]"),
        ("causal block", f"{_causal(config['causal'])} [{config['causal_source']}]"),
        ("mask token", f"{config['mask_token_id']} [{config['mask_token_source']}]"),
        ("RoPE", _rope_fact(config["rope"])),
        ("hidden width", config["hidden_dim"]),
        ("heads", _heads(config)),
        ("feed-forward width", config["ffn_dim"]),
        ("vocabulary", config["vocab_size"] or "not stated"),
        ("trained context", config["context_length"]),
        ("RMS epsilon", f"{config['rms_eps']:.6g}"),
        ("embedding", _embedding(config)),
        ("output head", _head(config)),
        ("defaults taken", "; ".join(config["defaults_taken"])),
    ]
    return _shown(rows)


def _shown(rows):
    return [(name, str(value)) for name, value in rows if value is not None and value != ""]


def _model_facts(model):
    sliding = model["window"] is not None
    return [
        ("layers", model["n_layers"]),
        ("hidden width", model["hidden_dim"]),
        ("heads", _heads(model)),
        ("feed-forward width", model["ffn_dim"]),
        ("trained context", model["context_length"]),
        ("delta net", _delta_net(model)),
        ("window", f"{model['window']} on S of {model['window_pattern']}" if sliding else None),
        ("RoPE", _rope_fact(model["rope"])),
        ("RoPE, sliding", _rope_fact(model["rope_sliding"]) if sliding else None),
        ("RMS epsilon", f"{model['rms_eps']:.6g}"),
        ("output head", "shared with the embedding" if model["tied_output"] else "own tensor"),
        ("MTP block", "yes" if model["mtp"] else None),
        ("defaults taken", "; ".join(model["defaults_taken"])),
        ("tensors not used", ", ".join(model["extra_tensors"])),
    ]


def _heads(model):
    return f"{model['n_heads']} (key/value {model['n_kv_heads']}, {model['head_dim']} wide)"


def _delta_net(model):
    delta = model["delta_net"]
    if delta is None:
        return None
    return (
        f"{delta['n_k_heads']} key and {delta['n_v_heads']} value heads, {delta['k_dim']} wide, "
        f"convolution over {delta['conv_taps']} rows, on D of {model['window_pattern']}"
    )


def _rope_fact(rope):
    if rope is None:
        return "none"
    text = f"{rope['style']}, {rope['n_dims']} dimensions, base {rope['freq_base']:g}"
    if rope["freq_scale"] != 1:
        text += f", scale {rope['freq_scale']:g}"
    return text + (f", YaRN factor {rope['yarn']['factor']:g}" if rope["yarn"] else "")


def _kind(config):
    if config["kind"] == "dflash":
        return "DFlash"
    return (
        f"DFlash2 (convolution over {config['conv_kernel']} rows in groups of "
        f"{config['conv_group']} channels, selector of rank {config['selector_rank']} over "
        f"{config['selector_top_k']} candidates)"
    )


def _causal(layers):
    if len(set(layers)) == 1:
        return "every layer" if layers[0] else "no layer"
    return f"C of {''.join('C' if causal else 'B' for causal in layers)}"  # B: both directions


def _embedding(config):
    text = "own table" if config["own_embedding"] else "the target's"
    scale = config["embedding_scale"]
    return text if scale == 1 else f"{text}, times {scale:g}"


def _head(config):
    text = "own tensor" if config["own_head"] else "the target's"
    if config["logit_scale"] != 1:
        text += f", logits times {config['logit_scale']:g} ({config['logit_scale_source']})"
    cap = config["final_softcap"]
    return text if cap is None else f"{text}, soft cap {cap:g}"
