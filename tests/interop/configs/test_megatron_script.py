"""Reading the arguments of Megatron-LM in shell scripts. Bash itself says which arguments a script gives."""

import subprocess
import time
from pathlib import Path

import pytest
from tests.errors import refused

from leaven.interop.configs import from_megatron
from leaven.interop.configs.megatron_arguments import Arguments, parse_arguments

SHAPE = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 128 --vocab-size 512"
TRAIN = f"torchrun pretrain_gpt.py {SHAPE}"
NO_COMMAND = "no command has --num-layers (here-documents and commands after ssh or sbatch are not searched); give"
IN_BLOCK = "the command with --num-layers is in a branch, loop or function, or in ( ) or { }; write"
ADVICE = "; write echo before the training command, run the script, and import the line that it prints"


def arguments_by_bash(script: str, folder: Path, *arguments: str) -> dict[str, list[str]]:
    """Return the flags that ``torchrun`` gets if bash runs the script. Its command prints its arguments instead."""
    stub = folder / "torchrun"
    stub.write_text("#!/bin/bash\nprintf '%s\\0' \"$@\" > arguments\n")
    stub.chmod(0o755)
    (folder / "script.sh").write_text(script)
    environment = {"PATH": f"{folder}:/usr/bin:/bin"}
    subprocess.run(["bash", "script.sh", *arguments], cwd=folder, env=environment, check=True, capture_output=True)
    found: dict[str, list[str]] = {}
    words = (folder / "arguments").read_text().split("\0")[:-1]
    for word in words[words.index("pretrain_gpt.py") + 1 :]:
        if word.startswith("--"):
            last, equals, value = word[2:].partition("=")
            found[last] = [value] if equals else []
        else:
            found[last].append(word)
    return found


KNOWN = {
    "variables and arrays": f"""
        LR=3e-4; export WD=0.1  # as published
        RATE=$LR
        ARGS=(
            --lr $RATE --weight-decay ${{WD}}  # it's the best
            # --adam-beta2 0.9 \\
            "--adam-beta2" '0.95' "--clip-grad 0.5"
        )
        ARGS+=(--seed=7 --norm-epsilon 1e-6)
        {TRAIN} ${{ARGS[@]}} --bf16""",
    "texts": f"""
        ARGS=" \\
            --lr 1 \\
            --seed 7 \\
            "
        ARGS="$ARGS --bf16"
        ARGS+=" --swiglu"
        {TRAIN} $ARGS --save "a b"'c'\\ d""",
    "elements in quotes": f"""
        ARGS=(--lr 1 --wandb-exp-name 'a --lr 2' --rampup-batch-size 2 2 300)
        MORE=()
        {TRAIN} "${{ARGS[@]}}" "${{MORE[@]}}" """,
    "the first element": f"ARGS=('--lr 1' --lr 2)\n{TRAIN} $ARGS",
    "assigned again": f"LR=1\nLR=2\nARGS='--lr 3'\nARGS=\"--lr $LR\"\n{TRAIN} $ARGS\nLR=4",
    "declared": f"declare -a ARGS=(--lr 1)\ndeclare -rx LR=2\n{TRAIN} ${{ARGS[@]}} --min-lr $LR",
    "after a program in the background": f"sleep 0 &\n\nLR=1\nsleep 0 & X=2\n{TRAIN} --lr $LR --seed $X",
    "compared": f"""
        LR=8 N=7
        if (( LR % 3 == 0 || LR <= N || LR != 8 && N >= 1 )); then N= ; echo; fi
        while let "LR < 1"; do echo; done
        if [ "$1" == "--num-layers" ] || test "$1" = --num-layers; then echo; fi
        printf "LR %s\\n" $LR; {TRAIN} --lr $LR""".replace("N= ; echo", "echo"),
    "one flag twice": f"{TRAIN} --lr 1 --lr 2",
    "after &&": f"export X=1 && \\\n{TRAIN} --lr 1 2>&1 | tee log",
    "in eval": f'CMD="{TRAIN} --lr 1 &> log"\necho $CMD\neval $CMD',
    "in bash -c": f"export X=1\nexport ARGS='--lr 1'\nCMD='{TRAIN} $ARGS # --lr 2'\nbash -c \"$CMD\"",
    "in sh -c, in single quotes": f"export ARGS='--lr 1'\nsh -c '\n  # --lr 3 \\\n  {TRAIN} $ARGS'",
    "beside other programs": f"""
        cat > config.json <<-EOF
        {{ "lr": "it's $LR", torchrun {SHAPE}
\tEOF
        cat <<< x; LR=1
        if [[ $X && ! -f pretrain_gpt.py ]]; then echo "--lr 2 (or --fp16)"; fi
        log() {{ echo "$1 LR"; }}
        log done; (cd . && LR=2 true); N=$(( $(echo 1) + 2 )); date > log 2>&1
        case $1 in --num-layers) N=2 ;; --lr|b) ;; (a|b) ;; *) ;; esac
        for N in 1 2; do echo $N; done
        {TRAIN} --lr $LR 2> log""",
    "# and ; in words": f"{TRAIN} --save a#b --wandb-exp-name 'sweep #3; x' --lr 1  # --lr 2\necho sweep #3",
    "defaults": f"""
        LR=; RATE=3
        ARGS="--lr ${{LR:-1}} --seed ${{SEED:-"7"}}"
        {TRAIN} $ARGS ${{OTHER:---bf16}} --lr ${{LR:-$RATE}}e-4 ${{MORE:-}}""",
}


@pytest.mark.parametrize("script", KNOWN.values(), ids=KNOWN.keys())
def test_known_arguments_are_those_of_bash(script: str, tmp_path: Path) -> None:
    found = parse_arguments(script, "x")
    assert found.flags == arguments_by_bash(script, tmp_path)
    assert not found.unknown
    assert not found.open


UNKNOWN = {
    "not set": "",
    "in a branch": "LR=1\nif [ $1 ]; then LR=2; fi",
    "in another branch": "LR=1\nif [ $1 ]\nthen :\nelse LR=2\nfi",
    "in a loop": "for X in 1 2; do LR=$X; done",
    "of a loop": "LR=1\nfor LR in 1 2; do :; done",
    "of an arithmetic loop": "LR=1\nfor ((LR=1; LR<=3; LR++)); do :; done",
    "in a case": "LR=1\ncase $1 in a|b) LR=2 ;; *) LR=3 ;; esac",
    "in a function before": "f() { LR=2; }\nLR=1\nf",
    "in a function after": "LR=1\nfunction f {\n  LR=2\n}\nf",
    "after &&": "LR=1\n[ $1 ] && LR=2",
    "after || in the next line": "LR=1\n[ $1 ] ||\n  LR=2",
    "after a pipe": "LR=1 | cat",
    "in the background": "LR=1 &",
    "in a subshell": "(LR=1)",
    "by read": "LR=1\nread -p LR? LR < file",
    "by a loop with read": "LR=1\ncat f | while IFS=, read -r N LR; do :; done",
    "by mapfile": "mapfile -t LR < f",
    "by let": "LR=1\nlet 'LR = LR + 1'",
    "by ((": "LR=1\n((LR*=2))",
    "by ++": "LR=1\n(( X > 2, ++LR ))",
    "by <<=": "LR=1\n((LR[0] <<= 2))",
    "by printf -v": "LR=1\nprintf -v LR %s 2",
    "by printf with an option and a name in one": "LR=1\nprintf -vLR %s 2",
    "by wait": "LR=1\nwait -n -p LR 1 2",
    "by wait with options in one": "LR=1\nsleep 1 &\nwait -fp LR",
    "by an open file": "LR=1\nexec {LR}>log",
    "by the open file of a loop": "LR=1\nwhile sleep 1; do :; done {LR}<file",
    "by command printf -v": "LR=1\ncommand printf -v LR %s 2",
    "by read with quotes": 'LR=1\nread -r "LR" <<< 2',
    "by read with a backslash": "LR=1\n\\read LR <<< 2",
    "by builtin read": "LR=1\nX=1 builtin read LR <<< 2",
    "by a declaration of a variable's name": "LR=1 NAME=LR\ndeclare $NAME=2e-3",
    "by a declaration in quotes": 'LR=1\nexport "LR=2"',
    "by read of a variable's name": "LR=1 NAME=LR\nread $NAME",
    "by unset": "LR=1\nunset LR",
    "by declare -i": "declare -i LR=1",
    "by an index": "LR=1\nLR[0]=2",
    "by source": "LR=1\nsource other.sh",
    "by an eval of a command": 'LR=1\neval "$(conda shell)"',
    "by eval in a branch": "LR=1\nif [ $1 ]; then eval 'LR=2'; fi",
    "the output of a command": "LR=$(cat 'it)s' # it's )\n)",
    "the output of another command": "LR=`cat file`",
    "arithmetic": "LR=$((1 + (2 * 3)))",
    "an argument": "LR=$1",
    "part of a variable": "X=12\nLR=${X%2}",
    "by another unknown variable": "RATE=$1\nLR=${RATE}e-4",
    "for one command": "LR=1 date",
    "changed without a space": "LR=1\nif [ $1 ]; then LR=$LR.5; fi",
    "after its use": "true\nif false; then LR=1; fi",
}


@pytest.mark.long
@pytest.mark.parametrize("lr", ["$LR", "${LR}", '"$LR"', "${LR[@]}"])
@pytest.mark.parametrize("script", UNKNOWN.values(), ids=UNKNOWN.keys())
def test_other_values_are_unknown(script: str, lr: str) -> None:
    found = from_megatron.read(f"{script}\n{TRAIN} --lr {lr}", "train.sh", "x")
    assert [
        line for line in found.unknown if "until the script runs" in line and line.startswith(("--lr: $", "--lr: `"))
    ]


def test_a_default_is_listed_and_does_not_hide_a_change() -> None:
    def lines(script: str) -> list[str]:
        unknown = from_megatron.read(f"{script}\n{TRAIN} --lr ${{LR:-1e-3}}", "train.sh", "x").unknown
        return [line for line in unknown if "$LR" in line]

    assert lines("") == [
        "$LR: leaven uses the script's default; the environment or an argument may set another value"
    ]
    assert lines("LR=1e-3") == []
    assert lines("if [ $1 ]; then LR=2; fi") == ["--lr: $LR (line 1 may change it) is unknown until the script runs"]


def test_the_line_that_may_change_a_variable_is_named() -> None:
    script = "LR=1\nX=1 \\\n  Y=2\nif [ $1 ]; then\n  LR=2\n  X='\n'\nfi\nX=1 Z=$(date)\nsource env.sh\nREST=1"
    use = "--lr $LR --min-lr $X --seed $Y --clip-grad $Z --adam-eps $REST --weight-decay $W"
    assert parse_arguments(f"{script}\n{TRAIN} {use}", "x").unknown == {
        "lr": "$LR (line 5 may change it)",
        "min-lr": "$X (line 6 may change it)",
        "seed": "$Y (line 10 may change it)",
        "clip-grad": "$Z (line 10 may change it)",
        "weight-decay": "$W",
    }
    nested = f"LR=1\nbash -c '\n\nread LR\n{TRAIN} --lr $LR'"
    assert parse_arguments(nested, "x").unknown == {"lr": "$LR (line 2 may change it)"}


def test_only_defaults_that_reach_a_flag_are_listed() -> None:
    script = "A=${X:-x} B=${Y:-1e-4}\nC=--min-lr=${Z:-1}"
    use = "--save $A/${1:-y} --lr $B $C --seed ${2:-5} --load ${LOAD:-z} ${MORE:-}"
    found = parse_arguments(f"{script}\n{TRAIN} {use}", "x")
    assert found.defaults == ["$Y", "$Z", "$2", "$MORE"]
    assert found.flags["min-lr"] == ["1"]
    found = parse_arguments(f"torchrun p.py ${{ARGS:-{SHAPE}}} --save ${{X:-1}}\ndate", "x")
    assert found.defaults == ["$ARGS", "$X"]  # without the default, no command trains


def test_a_file_that_only_sets_variables() -> None:
    for variable in (f"MODEL_ARGS='{SHAPE} --bf16'", f"MODEL_ARGS=({SHAPE} --bf16)"):
        script = f"if [ -z ${{CKPT}} ]; then\n  CKPT=a\nfi\necho Use $CKPT\n{variable}"
        found = parse_arguments(script, "x")
        assert (found.flags["num-layers"], found.flags["bf16"], found.open) == (["2"], [], [])
        found = parse_arguments(f"{script}\nENV='--lr 1'", "x")
        assert (found.flags["bf16"], found.open) == ([], ["$ENV (no command uses it)"])
        unknown = from_megatron.read(f"{script}\nENV='--lr 1'", "x", "x").unknown
        assert "$ENV (no command uses it): its flags are not read; add them if the run has them" in unknown
        for more in ("echo $MODEL_ARGS", "A=$MODEL_ARGS", "ssh host train", "cat > x <<EOF\n$MODEL_ARGS\nEOF"):
            with refused("x: ", NO_COMMAND):
                parse_arguments(f"{script}\n{more}", "x")


@pytest.mark.parametrize(
    "line",
    [
        'srun bash -c "{} --lr 1 --bf16"',
        "bash -c '{} --lr 1 --bf16'",
        "eval '{} --lr 1 --bf16'",
        "{} --bf16 --lr 1 > log.txt 2>&1",
        "{} --lr 1 --bf16 --moe-layer-freq ([0]*1+[1]*1) --save a",
        "{} --type transformer|embedding --lr 1 --bf16 --save a;b",
    ],
)
def test_a_file_of_one_line_is_a_script_or_a_list(line: str) -> None:
    found = parse_arguments(f"#!/bin/bash\n{line.format(TRAIN)}\n", "x").flags
    assert (found["lr"], found["bf16"], found["num-layers"]) == (["1"], [], ["2"])


EXTENDED = {
    "a text in a branch": "ARGS='--bf16'\nif [ $1 ]; then ARGS=\"$ARGS \\\n --lr 2\"; fi",
    "a text in front": "ARGS='--bf16'\nif [ $1 ]; then ARGS=\"--lr 2 ${ARGS}\"; fi",
    "an array in a branch": "ARGS=(--bf16)\nif [ $1 ]; then ARGS+=(--lr 2); fi",
    "an array with itself": 'ARGS=(--bf16)\n[ $1 ] && ARGS=("${ARGS[@]}" --lr 2)',
    "by +=": "ARGS=--bf16\nwhile [ $1 ]; do ARGS+=' --lr 2'; shift; done",
    "by a function": "f() { ARGS+=(--lr 2); }\nARGS=(--bf16)\nf",
    "in another variable": 'MORE=\'--bf16\'\nif [ $1 ]; then MORE="$MORE --lr 2"; fi\nARGS="$MORE"',
    "by arguments": 'ARGS=(--bf16 "$@")',
    "by a variable": "ARGS=(--bf16 $OTHER)",
}


@pytest.mark.parametrize("use", ["${ARGS[@]}", "--seed 7 ${ARGS[@]}"])
@pytest.mark.parametrize("script", EXTENDED.values(), ids=EXTENDED.keys())
def test_words_that_may_be_appended_are_unknown(script: str, use: str) -> None:
    found = parse_arguments(f"{script}\n{TRAIN} {use}", "x")
    assert found.flags["bf16"] == []
    assert "lr" not in found.flags
    assert len(found.open) == 1


@pytest.mark.parametrize(
    ("more", "places"),
    [
        ('"$@"', ["$@"]),
        ("$* $1 ${10} ${2:-}", ["$*", "$1", "$10"]),
        (
            "${@:2} $(cat flags) `cat 'a very long name of flags'` $(a\n\tb)",
            ["${@:2}", "$(cat flags)", "`cat 'a very long name of flag...", "$(a b)"],
        ),
        ("--bf16 $MORE", ["$MORE"]),
        ("--save $DIR --load ${HOME} --data-path $A $B", ["$B"]),
        ("--use-mcore-models $MORE_ARGS --no-load-rng ${EXTRA[@]}", ["$MORE_ARGS", "$EXTRA"]),
        ('--use-mcore-models "$@"', ["$@"]),
        ("--use-mcore-models $A_OPTS$B", ["$A_OPTS", "$B"]),
        ("--rampup-batch-size 2 2 $C", ["$C"]),
        ("> $1", []),
        ("`a``b``a`", ["`a`", "`b`"]),
    ],
)
def test_places_where_flags_may_be(more: str, places: list[str]) -> None:
    assert parse_arguments(f"date\n$1 torchrun $2 pretrain_gpt.py {SHAPE} {more}", "x").open == places


@pytest.mark.parametrize(
    "script",
    [
        "X=\nif [ $1 ]; then X='--bf16'; fi",
        "X='--bf16'\nif [ $1 ]; then X=; fi",
        "X=()\nf() { X+=($1 --lr 2); }\nf",
        "Y=--bf16\n[ $1 ] || X=$Y",
    ],
)
def test_a_variable_that_may_have_flags_is_no_value_of_an_unread_flag(script: str) -> None:
    places = parse_arguments(f"{script}\n{TRAIN} --overlap-grad-reduce $X", "x").open
    assert [place.partition(" ")[0] for place in places] == ["$X"]
    assert parse_arguments(f"{script.replace('--', '/')}\n{TRAIN} --lr 1 --save a/$X", "x").open == []


@pytest.mark.parametrize("more", ["--plugin-file my.py", "--config-script=a.py --hook b.py"])
def test_a_python_file_may_be_the_value_of_a_flag(more: str) -> None:
    for launch in ("torchrun --nproc_per_node 8 --log-file x.py", "python launch.py --nnodes 2", "python"):
        found = parse_arguments(f"date\n{launch} pretrain_gpt.py --bf16 {more} --lr 1 {SHAPE}", "x").flags
        assert found["bf16"] == []
        assert found["lr"] == ["1"]
    assert parse_arguments(f"--bf16 {more} --lr 1 {SHAPE}", "x").flags["bf16"] == []


def test_placeholders_are_unknown() -> None:
    script = "P=<Specify path>\nA='--bf16 --seed 7'\ndate <in >out\ndate <in 2>&1"
    found = parse_arguments(f"{script}\n{TRAIN} --save <PATH> $A --load $P --lr <LR>", "x")
    assert (found.flags["bf16"], found.flags["seed"]) == ([], ["7"])
    assert (found.unknown, found.open) == ({"lr": "<LR>"}, [])
    found = parse_arguments(f"{TRAIN} <more flags> --bf16 <MORE>\ndate", "x")
    assert found.open == ["<more flags>", "<MORE>"]


def test_a_space_that_does_not_break_lines_is_a_space() -> None:
    assert parse_arguments(f"{TRAIN} --lr 1\u00a0\\\n--bf16".replace(" \\", "\\"), "x").flags["lr"] == ["1"]


def test_a_list_of_arguments_is_not_read_as_a_shell_does() -> None:
    pattern = "--moe-layer-freq ([0]*1+[1]*1) --pp-partition-method type:transformer|embedding --lr 1"
    for text in (f"{TRAIN} {pattern}", f"# of yesterday\n\n{SHAPE} {pattern}".replace(" --", "\n--")):
        found = parse_arguments(text, "x")
        assert found.flags["moe-layer-freq"] == ["([0]*1+[1]*1)"]
        assert found.flags["lr"] == ["1"]
    found = parse_arguments("--lr $LR \\\n --save '$X' --bf16\n--seed\n7 # of the data\n--split 9,1", "x")
    assert found == Arguments(
        {"lr": ["\0$LR\0"], "save": ["$X"], "bf16": [], "seed": ["7"], "split": ["9,1"]}, {"lr": "$LR"}
    )
    assert parse_arguments("ARGS=(\n--num-layers 1 '--seed 7' # x\n)\n", "x").flags == {
        "num-layers": ["1"],
        "seed 7": [],
    }


@pytest.mark.parametrize(
    ("script", "says"),
    [
        (f"{TRAIN} --lr 1\n{TRAIN} --lr 2", f"several commands have --num-layers{ADVICE}"),
        (f"if [ $1 ]; then {TRAIN} --lr 1; fi\n{TRAIN} --lr 2", "several commands have"),
        (
            f"for LR in 1 2; do\n{TRAIN} --lr $LR\ndone",
            IN_BLOCK,
        ),
        (
            f"train() {{ {TRAIN}; }}\ntrain",
            IN_BLOCK,
        ),
        (
            f"ARGS='{SHAPE}'\necho torchrun pretrain_gpt.py $ARGS",
            NO_COMMAND,
        ),
        (
            f"bash <<EOF\n{TRAIN}\nEOF",
            NO_COMMAND,
        ),
        (
            "ARGS=(--lr 1)\nMORE=(--bf16)",
            NO_COMMAND,
        ),
        (f"date\n{TRAIN} --lr '1", f"leaven cannot read line 2 (unmatched '){ADVICE}"),
        (f'date\n{TRAIN} --lr "1', "cannot read line 2"),
        (f"date\n\n{TRAIN} --lr $(cat", "cannot read line 3 (unmatched $()"),
        (f"date\n{TRAIN} --lr ${{LR", "cannot read line 2 (unmatched ${)"),
        (f"ARGS=(--lr 1\n{TRAIN}", "cannot read line 1 (ARGS=( has no end)"),
        (f"if [ $1 ]; then\n{TRAIN}\n", "(fi is missing)"),
        (f"LR=1\ndone\n{TRAIN}", "cannot read line 2 (unexpected done)"),
        (f"X=a )\n{TRAIN}", "(unexpected ))"),
        (
            f"{TRAIN}\n  --lr 1\n",
            "cannot read line 2 (--lr starts a new command; end the line before with a backslash)",
        ),
        (f"{TRAIN} \\\n  # --lr 1 \\\n  --lr 2\n", "line 3 (--lr starts a new command; remove the comment above)"),
        (f"ARGS='--lr=1 --bf16'\n{TRAIN}\n  $ARGS\n", "line 3 (--lr starts a new command; end the line before"),
        (f"date\nbash -c '\n\n}} {TRAIN}'", "line 2 (unexpected }"),
        (
            f"ARGS='{SHAPE}'\nsource env.sh\ntorchrun p.py ${{ARGS[@]}} $X",
            "may be in $ARGS (line 2 may change it), $X, which is unk",
        ),
        (f"{{ {TRAIN}; }} | tee log", IN_BLOCK),
        (f"ssh host '{TRAIN}'\ndate", NO_COMMAND),
        ("MODEL_ARGS:\n  --num-layers: 24\n  --bf16: true", "looks like YAML or the log of a run; give the script"),
        ("--num-layers: 24\n--bf16: true", "looks like YAML"),
        ("[0]: using world size: 8 (a)\n  num_layers .......... 24", "looks like YAML or the log of a run"),
        (
            f"{SHAPE} --bf16 {'`a`' * 99}b",
            "`a``a``a``a``a``a``a``a``a``a``a``a``a``a``a``a``a``a``a``a`... after --bf16",
        ),
        (f"CMD='{TRAIN}\n --lr 1'\nbash -c \"$CMD\"", "(--lr starts a new command"),
        (f"[[ $X =~ ^(a|b)$ ]]\n{TRAIN}", "(unexpected ()"),
        (f"P=<a path of 2>\nA=--bf16\n{TRAIN} $A", "line 1 (no file after 2>; replace placeholders such as <PATH>)"),
        (f"date > && LR=1\n{TRAIN}", "line 1 (no file after >; replace placeholders such as <PATH>)"),
        (f"{TRAIN} && date >", "line 1 (no file after >; replace placeholders such as <PATH>)"),
        (f"{SHAPE}\n--lr 6e-4 –weight-decay 0.3", "–weight-decay has a dash instead of hyphens"),
        (f"{SHAPE} --save x —bf16", "—bf16 has a dash instead of hyphens; write -- before the name of a flag"),
        (
            f"{SHAPE} --lr 6e-4 weight-decay",
            "weight-decay after --lr is not the value of any flag; correct or remove",
        ),
        (f"{SHAPE} --bf16 on", "on after --bf16 is not the value of any flag"),
        (
            "",
            NO_COMMAND,
        ),
        ("A=1", "no command has --num-layers"),
        ("$" * 500_000, "and leaven reads at most 131,072; give a file with only the arguments"),
        ("A0=x\n" + "".join(f'A{i + 1}="$A{i} $A{i}"\n' for i in range(40)), "more than 1,048,576 characters"),
        ('X=\'eval "$X"\'\neval "$X"', "more than 1,048,576 characters"),
    ],
)
def test_other_scripts_are_refused(script: str, says: str) -> None:
    with refused("train.sh: ", says):
        parse_arguments(script, "train.sh")


UNITS = [
    "$((",
    "$(",
    "${N:-",
    "A=(",
    "((N=",
    "if ",
    "for N in a; do ",
    "bash -c '",
    "<<E\n",
    "[[ ",
    '"$A',
    "``",
    "((A ",
    "let A[",
    "\n((A++)) ",
    "<",
    "<a",
    "\0",
    "$A ",
]


@pytest.mark.long
@pytest.mark.parametrize("unit", UNITS)
def test_a_script_is_read_in_linear_time(unit: str) -> None:
    start = time.process_time()
    with refused("x: "):
        parse_arguments("A=1\n" + unit * (130_000 // len(unit)), "x")
    assert time.process_time() - start < 8
