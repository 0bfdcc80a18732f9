"""From raw text to a published figure: what the scripts/*.sh call.

    python -m recipes COMMAND --help          # COMMAND is train, evaluate, reproduce, …: see __main__.py

| module | what it holds |
|---|---|
| command.py | options, commands that are shown, atomic files, locks, pinned settings |
| corpora.yaml, corpora.py | the corpora, and how their files are had and checked |
| examples.py | what is read from files of texts with labels, and of pairs of texts |
| prepare.py | raw text of any kind -> binarised data |
| recipes.yaml, hyperparameters.py | the recipes: optimizer, batch, length, averaging, search |
| train.py | the fairseq-train command of a recipe, for any number of GPUs, machines or CPU processes |
| tasks.py, translation.py | evaluate.sh; the tasks, and how a model of each is scored and compared |
| metrics.py | scores of written text |
| scoring.py | what the evaluations of all tasks share |
| tables.yaml, tables.py | the results tables, each one entry; their cells |
| translate.py | sentences of one's own, translated |
| quickstart.py | data, training and scores in one command |
| reproduce.py, record.py | runs the cells; what a run measured, as JSON |
| cluster.smk | the same cells as jobs of a cluster, for Snakemake |
| analysis.py | what attention has learned in the models of a table |
| choice.py | which function to choose: quality against speed |
| provenance.py | commit, versions and hardware of a run |
| render.py, pictures.py | Markdown and PNG, rendered from the above |
"""
