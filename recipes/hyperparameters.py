"""The recipes: how any model of a size is trained and tested. The one place for these values.

scripts/train.sh, evaluate.sh and reproduce.sh read them here; Hydra's configs/*.yaml are rendered from them by
`python scripts/make_tables.py`.
"""

from dataclasses import dataclass, field, replace
from typing import Any, Dict, Mapping, Optional

BASELINES = {"lightconv_lm": "lightconv_lm", "linformer": "roberta_linformer"}  # beginnings of their architectures


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
    average: int = 5  # last checkpoints; 0: the best by validation alone
    beam: int = 4
    lenpen: float = 0.6
    max_length: int = 256  # of the architecture: the longest sentence in tokens
    gpus: Optional[int] = None  # None: all there are
    threads: Optional[int] = None  # of the CPU. Their number changes the rounding, and so the figures
    hydra_gpus: int = 8  # for which the YAML is rendered
    kind: str = "transformer"  # beginning of the architecture's name
    task: str = "translation"  # fairseq's name
    init: str = ""  # the table whose run of this data set, model and seed it begins with
    context_window: int = 0  # of fairseq-eval-lm: the least context of a token

    @property
    def checkpoint(self) -> str:
        """The name of the checkpoint of a run that is evaluated."""
        return "checkpoint_avg.pt" if self.average else "checkpoint_best.pt"

    def architecture(self, model: str) -> str:
        """The name for --arch of a model of the tables; ``transformer`` stands for fairseq's own of this kind."""
        if model in BASELINES:
            return f"{BASELINES[model]}_{self.preset}"
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

# Rows are blocks of the running text, which no sentence is too long for. Of the paper's model of One Billion Word
# only the sizes are known, the rest is the usual recipe of a Transformer of this size
LM1B = Recipe(
    "lm1b",
    "lm1b",
    {
        "tokens-per-sample": "256",
        "sample-break-mode": "none",
        "optimizer": "adam",
        "adam-betas": "(0.9, 0.98)",
        "lr": "1e-3",
        "lr-scheduler": "inverse_sqrt",
        "warmup-updates": "8000",
        "warmup-init-lr": "1e-7",
        "clip-norm": "1.0",
        "dropout": "0.1",
    },
    batch_tokens=65536,
    max_tokens=8192,
    max_update=300_000,
    save_every=5000,
    average=0,
    kind="transformer_lm",
    task="language_modeling",
)
# fairseq's own for adaptive inputs (Baevski and Auli 2019), with the rows of the preset
WIKITEXT103 = replace(
    LM1B,
    preset="wiki103",
    corpus="wikitext103",
    flags={
        "tokens-per-sample": "512",
        "sample-break-mode": "none",
        "criterion": "adaptive_loss",
        "optimizer": "nag",
        "lr": "1.0",
        "lr-scheduler": "cosine",
        "t-mult": "2",
        "lr-period-updates": "270000",
        "lr-shrink": "0.75",
        "min-lr": "1e-4",
        "stop-min-lr": "1e-9",
        "warmup-updates": "16000",
        "warmup-init-lr": "1e-7",
        "clip-norm": "0.1",
    },
    batch_tokens=73728,
    max_tokens=9216,
    max_update=286_000,
    max_length=512,
    context_window=400,
)
# Two epochs of Penn Treebank. The learning rate is that of multi30k_cpu, whose models have this width too
PTB_CPU = replace(
    LM1B,
    preset="ptb",
    corpus="ptb",
    flags={
        **LM1B.flags,
        "tokens-per-sample": "128",
        "lr": "3e-3",
        "lr-scheduler": "cosine",
        "warmup-updates": "200",
        "dropout": "0.1",
        "num-workers": "0",
        "validate-interval": "1000",  # validated with every save, and not with every epoch too
    },
    batch_tokens=1024,
    max_tokens=4096,
    max_update=1800,
    save_every=300,
    max_length=128,
    gpus=0,
    threads=1,
)

AGNEWS = Recipe(
    "agnews",
    "agnews",
    {
        "criterion": "sentence_prediction",
        "num-classes": "4",
        "init-token": "0",
        "separator-token": "2",
        "max-positions": "128",
        "shorten-method": "truncate",
        "optimizer": "adam",
        "adam-betas": "(0.9, 0.98)",
        "lr": "5e-4",
        "lr-scheduler": "inverse_sqrt",
        "warmup-updates": "500",
        "warmup-init-lr": "1e-7",
        "clip-norm": "1.0",
        "dropout": "0.1",
        "best-checkpoint-metric": "accuracy",
        "maximize-best-checkpoint-metric": None,
    },
    batch_tokens=8192,
    max_tokens=8192,
    max_update=10_000,
    save_every=500,
    average=0,
    max_length=128,
    kind="roberta",
    task="sentence_prediction",
)
IMDB = AGNEWS.changed({"num-classes": "2", "max-positions": "512"}, preset="imdb", corpus="imdb", max_length=512)
CLASSIFICATION_CPU = {"num-workers": "0", "validate-interval": "1000"}

# a ninth of the training, for one CPU thread
MULTI30K_CPU = MULTI30K.changed(
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
)
NEWS_CPU = replace(MULTI30K_CPU, corpus="news", max_update=3000, save_every=150)

RECIPES: Dict[str, Recipe] = {
    "wmt_en_de": WMT,
    "wmt_en_fr": replace(WMT, preset="wmt_en_fr"),
    "wmt_en_de_big": WMT.changed({"lr": "5e-4", "dropout": "0.3"}, preset="wmt_en_de_big"),
    "multi30k": MULTI30K,
    "multi30k_cpu": MULTI30K_CPU,
    # two stages: news, then captions
    "news_cpu": NEWS_CPU,
    "multi30k_from_news_cpu": NEWS_CPU.changed(
        {"lr": "1e-3", "warmup-updates": "200"}, max_update=2000, save_every=100, init="news_cpu"
    ),  # fmt: skip
    "lm1b": LM1B,
    "wikitext103": WIKITEXT103,
    "ptb_cpu": PTB_CPU,
    "wikitext2_cpu": replace(PTB_CPU, corpus="wikitext2"),
    "agnews": AGNEWS,
    "imdb": IMDB,
    "agnews_cpu": AGNEWS.changed(
        CLASSIFICATION_CPU, batch_tokens=2048, max_tokens=4096, max_update=3500, save_every=350, gpus=0, threads=1
    ),
    "imdb_cpu": IMDB.changed(
        CLASSIFICATION_CPU, batch_tokens=4096, max_tokens=4096, max_update=1600, save_every=160, gpus=0, threads=1
    ),
}
