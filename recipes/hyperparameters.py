"""The recipes: how any model of a size is trained and tested. The one place for these values.

scripts/train.sh, evaluate.sh and reproduce.sh read them here; Hydra's configs/*.yaml are rendered from them by
`python scripts/make_tables.py`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Dict, Mapping, Optional


@dataclass(frozen=True)
class Recipe:
    """A training and its evaluation.

    `flags` are fairseq-train's own, by name; None stands for a flag without a value. What is not explained is the
    default of the option of the same name of train.sh or evaluate.sh.
    """

    preset: str  # ending of the architecture's name: the sizes
    corpus: str
    flags: Mapping[str, Optional[str]] = field(default_factory=dict)
    batch_tokens: int = 32768
    max_tokens: int = 4096
    max_update: int = 100_000
    save_every: Optional[int] = 1500  # updates; None: each epoch, and stop after 10 without a better validation loss
    average: int = 5
    beam: int = 4
    lenpen: float = 0.6
    max_length: int = 256  # of the architecture: the longest sentence in tokens
    gpus: Optional[int] = None  # None: all there are
    threads: Optional[int] = None  # of the CPU. Their number changes the rounding, and so the figures
    hydra_gpus: int = 8  # for which the YAML is rendered
    kind: str = "transformer"  # beginning of the architecture's name
    task: str = "translation"

    def architecture(self, model: str) -> str:
        """The name for --arch of a model of the tables; ``transformer`` stands for fairseq's own of this kind."""
        if model == "transformer":
            # fairseq knows no other base Transformer for En-Fr
            return f"{self.kind}_{self.preset.replace('wmt_en_fr', 'wmt_en_de')}"
        return f"{self.kind}_synth_{model}_{self.preset}"

    def changed(self, flags: Mapping[str, str], **others: Any) -> "Recipe":
        """This recipe with other values."""
        return replace(self, flags={**self.flags, **flags}, **others)


TRANSFORMER: Dict[str, Optional[str]] = {
    "optimizer": "adam",
    "adam-betas": "(0.9, 0.98)",
    "lr-scheduler": "inverse_sqrt",
    "warmup-init-lr": "1e-7",
    "criterion": "label_smoothed_cross_entropy",
    "label-smoothing": "0.1",
    "share-all-embeddings": None,
}

# fairseq's usual settings for WMT14, as the paper's are not known
WMT = Recipe("wmt_en_de", "wmt14", {**TRANSFORMER, "lr": "7e-4", "warmup-updates": "4000", "dropout": "0.1"})
# Wu et al. 2021 (arXiv 2105.14462)
MULTI30K = Recipe(
    "multi30k",
    "multi30k",
    {**TRANSFORMER, "lr": "5e-3", "warmup-updates": "2000", "dropout": "0.3"},
    batch_tokens=8192,
    max_update=8000,
    save_every=None,
    average=10,
    beam=5,
    lenpen=1,
    max_length=100,
    hydra_gpus=2,
)

RECIPES: Dict[str, Recipe] = {
    "wmt_en_de": WMT,
    "wmt_en_fr": replace(WMT, preset="wmt_en_fr"),
    "wmt_en_de_big": WMT.changed({"lr": "5e-4", "dropout": "0.3"}, preset="wmt_en_de_big"),
    "multi30k": MULTI30K,
    # a ninth of the training, for one CPU thread
    "multi30k_cpu": MULTI30K.changed(
        {
            "lr": "3e-3",
            "warmup-updates": "1500",
            "dropout": "0.1",
            "clip-norm": "1.0",
            "num-workers": "0",
            "validate-interval": "1000",  # validated with every save, and not with every epoch too
        },
        batch_tokens=1024,
        max_update=7000,
        save_every=350,
        average=5,
        gpus=0,
        threads=1,
        hydra_gpus=1,
    ),
}
