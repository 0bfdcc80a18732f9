"""The recipes of recipes.yaml: how any model of a size is trained and tested."""

import re
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Sequence

from .command import UserError

# the models that models are compared with, and the beginnings of their architectures; transformer_plus is T5 Base+
BASELINES = {name: name for name in ("lightconv_lm", "lightconv", "dynamicconv", "transformer_plus")}
BASELINES["linformer"] = "roberta_linformer"


@dataclass(frozen=True)
class Recipe:
    """A training and its evaluation.

    What is not explained is the default of the option of the same name of train.sh or evaluate.sh.
    """

    preset: str  # ending of the architecture's name: the sizes
    corpus: str
    flags: Mapping[str, Optional[str]] = field(default_factory=dict)  # of fairseq-train
    batch_tokens: int = 32768
    max_tokens: int = 4096
    max_update: int = 100_000
    save_every: Optional[int] = 2000  # updates; None: each epoch, and stop after 10 without a better validation loss
    average: int = 5  # last checkpoints; 0: the best by validation alone
    beam: int = 4
    lenpen: float = 0.6
    max_length: int = 256  # of the architecture: the longest sentence in tokens
    gpus: Optional[int] = None  # None: all there are
    threads: Optional[int] = None  # of the CPU. Their number changes the rounding, and so the figures
    kind: str = "transformer"  # beginning of the architecture's name
    task: str = "translation"  # fairseq's name
    init: str = ""  # the table whose run of this data set, model and seed it begins with
    pair: str = ""  # the sides of the text where they are no languages: source-target
    generation: Mapping[str, object] = field(default_factory=dict)  # more flags of fairseq-generate
    context_window: int = 0  # of fairseq-eval-lm: the least context of a token

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint of a run that is evaluated."""
        return "checkpoint_avg.pt" if self.average else "checkpoint_best.pt"

    def architecture(self, model: str) -> str:
        """The name for --arch of a model of the tables; ``transformer`` stands for fairseq's own of this kind."""
        if model == "transformer":
            # fairseq knows no other base Transformer for En-Fr
            return f"{self.kind}_{self.preset.replace('wmt_en_fr', 'wmt_en_de')}"
        return f"{BASELINES.get(model, f'{self.kind}_synth_{model}')}_{self.preset}"


def number_of(flag: str, words: Sequence[str]) -> Optional[int]:
    """The number that a flag such as ``--gpus`` has among the words of a command: the last one, as that counts."""
    found = re.findall(rf"(?:^| ){flag}[= ](\d+)", " ".join(words))
    return int(found[-1]) if found else None


def read_data(name: str) -> Dict[str, Dict[str, Any]]:
    """The entries of a YAML file beside this module. `like` in one takes the values of an earlier one."""
    import yaml

    path = Path(__file__).with_name(name)
    try:
        entries: Dict[str, Dict[str, Any]] = yaml.safe_load(path.read_text(encoding="utf-8"))
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise UserError(f"{path}: line {line}: {error.problem}") from None
    for key, entry in entries.items():
        like = entry.pop("like", key)
        if like not in entries:
            raise UserError(f"{path}: {key}: there is no {like} to be like")
        flags = {**entries[like].get("flags", {}), **entry.get("flags", {})}
        entries[key] = {**entries[like], **entry, **({"flags": flags} if flags else {})}
    return entries


def make(file: str, key: str, kind: Any, entry: Mapping[str, Any], **more: Any) -> Any:
    """An entry of a YAML file as its dataclass."""
    for name in entry:
        if name not in {known.name for known in fields(kind)}:
            raise UserError(f"recipes/{file}: {key}: {name} is no key of a {kind.__name__.lower()}")
    try:
        return kind(**entry, **more)
    except TypeError as error:
        raise UserError(f"recipes/{file}: {key}: {str(error).split('__() ')[-1]}") from None


def read_recipes() -> Dict[str, Recipe]:
    """The recipes, by name; every flag's value is text."""
    found = {}
    for name, entry in read_data("recipes.yaml").items():
        flags = {flag: None if value is None else str(value) for flag, value in entry.pop("flags", {}).items()}
        found[name] = make("recipes.yaml", name, Recipe, entry, flags=flags)
    return found


RECIPES = read_recipes()
