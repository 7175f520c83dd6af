"""Rows of bad input: flags, and folders that hold something else than the command takes."""

from tests.cli.bad_rows import BROKEN, Bad

_COMPARE = "compare --model demo --out {out}"
_TRAIN = "train --model demo --out {out}"
_DIGITS = "9" * 20

_VALUES = [
    (_COMPARE, f"--num-prompts {_DIGITS}", "'prompts.num_prompts'"),
    (_COMPARE, "--num-prompts -1", "'prompts.num_prompts'"),
    (_COMPARE, f"--samples-per-prompt {_DIGITS}", "'sampling.samples_per_prompt'"),
    (_COMPARE, f"--max-new-tokens {_DIGITS}", "'sampling.max_new_tokens'"),
    (_COMPARE, "--max-new-tokens 0", "'sampling.max_new_tokens'"),
    (_COMPARE, "--temperature nan", "'sampling.temperature'"),
    (_COMPARE, "--temperature inf", "'sampling.temperature'"),
    (_COMPARE, "--temperature 1e300", "'sampling.temperature'"),
    (_COMPARE, "--temperature -0", "'sampling.temperature'"),
    (_COMPARE, f"--seed {_DIGITS}", "'sampling.seed'"),
    (_COMPARE, "--seed -1", "'sampling.seed'"),
    (_COMPARE, "--num-prompts many", "many"),
    (_COMPARE, "--num-prompts 1.5", "1.5"),
    (_COMPARE, "--device cuda:-1", "'cuda:-1' is not a device's name"),
    (_COMPARE, "--attention fast", "'training.attention'"),
    (_COMPARE, "--revision main", "is a folder, which has no revisions"),
    (_COMPARE, "--vllm.tensor_parallel_size 0", "--vllm.tensor_parallel_size 0 cannot be used; give at least 1"),
    (_COMPARE, "--vllm.pipeline_parallel_size -2", "--vllm.pipeline_parallel_size -2 cannot be used"),
    (_COMPARE, "--vllm.max_num_seqs 0", "--vllm.max_num_seqs 0 cannot be used"),
    (_COMPARE, "--vllm.block_size -1", "--vllm.block_size -1 cannot be used"),
    (_COMPARE, f"--vllm.max_num_seqs {'9' * 5000}", "--vllm.max_num_seqs takes a whole number"),
    (_COMPARE, "--vllm.max_model_len -5", "--vllm.max_model_len -5 leaves prompt"),
    (_COMPARE, "--vllm. 1", "vLLM has no argument ''"),
    (_COMPARE, "--prompts ~nouser/x.jsonl", "there is no user 'nouser' here"),
    (_COMPARE, "--prompts ", "prompt source '' is unknown"),
    (_COMPARE, "--prompts /dev/zero", "'/dev/zero' is unknown"),
    (_COMPARE, f"--prompts {'x' * 300}.jsonl", "it does not exist"),
    (_COMPARE, f"--prompts sums:terms={'9' * 5000}", "prompt source 'sums:terms=9"),
    (_COMPARE, "--prompts sums:terms=5-2", "within 2-99"),
    (_COMPARE, "--prompts hub:", "names no data set"),
    (_COMPARE, "--prompts {folder}/pipe.jsonl", "it is a pipe or a device"),
    (_COMPARE, "--prompts {folder}/folder.jsonl", "it is a folder"),
    (_COMPARE, "--prompts {folder}/pipe.parquet", "it is a pipe or a device"),
    (_COMPARE, "--prompts {folder}/folder.parquet", "it is a folder"),
    (_COMPARE, "--config {folder}/pipe.toml", "it is a pipe or a device"),
    (_COMPARE, "--config {folder}/pipe.yaml", "it is a pipe or a device"),
    (_COMPARE, "--config {folder}/folder.toml", "it is a folder"),
    (_COMPARE, "--config /dev/zero", "is neither .toml nor .yaml"),
    (_COMPARE, f"--config {'x' * 300}.toml", "does not exist"),
    (_COMPARE, "--gate {folder}/pipe.toml", "--gate"),
    (_COMPARE, "--baseline {run}", "--baseline needs --gate"),
    (_TRAIN, "--learning-rate 1e300", "'optimizer.learning_rate'"),
    (_TRAIN, "--learning-rate nan", "'optimizer.learning_rate'"),
    (_TRAIN, "--learning-rate -0", "'optimizer.learning_rate'"),
    (_TRAIN, f"--steps {_DIGITS}", "'steps'"),
    (_TRAIN, "--steps 0", "'steps'"),
    (_TRAIN, f"--num-problems {_DIGITS}", "'task.num_problems'"),
    (_TRAIN, f"--prompts-per-step {_DIGITS}", "'rollout.prompts'"),
    (_TRAIN, f"--samples-per-prompt {_DIGITS}", "'rollout.samples'"),
    (_TRAIN, f"--max-new-tokens {_DIGITS}", "'rollout.max_new_tokens'"),
    (_TRAIN, "--temperature 1e300", "'rollout.temperature'"),
    (_TRAIN, f"--lora-rank {_DIGITS}", "'policy.lora.rank'"),
    (_TRAIN, f"--checkpoint-every {_DIGITS}", "'checkpoint.every'"),
    (_TRAIN, f"--seed {_DIGITS}", "'seed'"),
    (_TRAIN, "--report-to nobody", "'report_to.0'"),
    (_TRAIN, "--objective best", "objective 'best' is unknown"),
    (_TRAIN, "--reward nothing", "reward 'nothing' is unknown"),
    (_TRAIN, "--reward :f", "there is no module ''"),
    (_TRAIN, "--guards {folder}/pipe.toml", "--guards"),
    (_TRAIN, "--guards {missing}", "is neither .toml nor .yaml"),
    (_TRAIN, "--train-dtype fp64", "fp64 is only a reference"),
    ("sanity --model demo --out {out}", f"--candidates {_DIGITS}", "'candidates'"),
    ("sanity --model demo --out {out}", f"--solve-samples {_DIGITS}", "'solve_samples'"),
    ("sanity --model demo --out {out}", "--keep-low nan", "'keep_low'"),
    ("sanity --model demo --out {out}", "--keep-high -1", "'keep_high'"),
    ("evaluate --model demo --out {out}", f"--num-problems {_DIGITS}", "'prompts.num_prompts'"),
    ("evaluate --model demo --out {out}", "--reward none:none", "there is no module 'none'"),
    ("headroom --model demo --out {out}", f"--batch-tokens {_DIGITS}", "'batch_tokens'"),
    ("headroom --model demo --out {out}", "--temperature nan", "'sampling.temperature'"),
    ("headroom --model demo --out {out}", "--run {run}", "leave --out out"),
    ("localize --model demo --out {out}", "--dtype fp8", "dtype 'fp8' cannot be used"),
    ("localize --model demo --out {out}", "--dtype int8", "'train_dtype' and 'infer_dtype' are not usable: dtype"),
    ("audit --model demo --out {out}", "--server nonsense", "begins with http:// or https:// and a host"),
    ("localize --model demo --out {out}", "--dtype fp16 --train-dtype fp16", "--dtype sets both sides"),
]

_MODELS = [
    ("", "the model has no name"),
    ("~nouser/checkpoint", "there is no user 'nouser' here"),
    ("x/" * 200 + "x", "does not exist"),
    ("x" * 300 + "/y/z", "does not exist"),
    ("{missing}", "does not exist"),
    ("{gate}", "is a file, not a folder"),
    ("{run}", "it has no config.json"),
    ("{folder}", "is a pipe, a socket or a device"),
]

_WRONG_FOLDERS = [
    ("evaluation", "holds an evaluation"),
    ("training", "holds a training run"),
    ("sanity", "holds a sanity test"),
    ("headroom", "holds what headroom found"),
    ("localize", "holds what localize found"),
    ("floor", "is a file, not a run directory"),
    ("missing", "does not exist"),
]
_TAKES_COMPARISONS = [
    "gate {{{0}}} --config {{gate}}",
    "gate {{run}} --config {{gate}} --baseline {{{0}}}",
    "diff {{{0}}} {{run}}",
    "diff {{run}} {{{0}}}",
    "diff {{{0}}} {{run}} --rescore --out {{out}}",
    "headroom --run {{{0}}}",
    "localize --run {{{0}}}",
]
_RESUMES = [
    ("compare", "run"),
    ("evaluate", "evaluation"),
    ("train", "training"),
    ("sanity", "sanity"),
]
_TO_RESUME = [
    ("run", "holds a comparison"),
    *(row for row in _WRONG_FOLDERS if row[0] not in ("floor", "missing")),
    ("floor", "holds no run that --resume could continue"),
    ("missing", "holds no run that --resume could continue"),
]

ROWS = [
    *(Bad(f"{command} {flags}", words) for command, flags, words in _VALUES),
    *(Bad(f"compare --out {{out}} --model {model}", words) for model, words in _MODELS),
    *(Bad(f"{command} --model ", "the model has no name") for command in ("train", "evaluate", "headroom", "localize")),
    *(
        Bad(command.format(place), words)
        for command in _TAKES_COMPARISONS
        for place, words in _WRONG_FOLDERS
        if place != "evaluation"
    ),
    *(
        Bad(f"{command} --model demo --resume --out {{{place}}}", words)
        for command, taken in _RESUMES
        for place, words in _TO_RESUME
        if place != taken
    ),
    Bad("report {missing}", "it is not a run directory"),
    Bad("report {floor}", "is a file, not a run directory"),
    Bad("report {training} --recompute", "--recompute is for comparisons"),
    Bad("report {run} {training} --out {out}", "is no training run"),
    Bad("schema everything", "is no document with a schema"),
    Bad("compare --model demo --out " + "x" * 300, "the path is too long", BROKEN),
]
