"""Subwords without a tokeniser: trains a joint SentencePiece model, or splits text by one.

    python scripts/sentence_pieces.py train VOCABULARY FILE [FILE ...] [--sentinels N] > MODEL
    python scripts/sentence_pieces.py encode MODEL < TEXT > PIECES

The sentencepiece package has no command line. Unigram model of the default normalisation (NFKC); every character is
covered, as French and German have few; trained on up to 10 million lines drawn at random. With --sentinels
<extra_id_0> to <extra_id_N-1>, which mark spans taken out, are pieces of their own.
"""

import io
import sys

import sentencepiece


def main() -> None:
    command, argument, *files = sys.argv[1:]
    if command == "train":
        sentinels = int(files[files.index("--sentinels") + 1]) if "--sentinels" in files else 0
        files = files[: files.index("--sentinels")] if sentinels else files
        model = io.BytesIO()
        try:
            sentencepiece.SentencePieceTrainer.train(
                input=files,
                model_writer=model,
                vocab_size=int(argument),
                character_coverage=1.0,
                input_sentence_size=10_000_000,
                max_sentence_length=1 << 20,  # bytes: longer ones, as articles are by default, would be left out
                shuffle_input_sentence=True,
                minloglevel=2,
                user_defined_symbols=[f"<extra_id_{i}>" for i in range(sentinels)],
            )
        except RuntimeError as error:
            sys.exit(f"error: --merges {argument}: {str(error).rsplit(') ] ', 1)[-1].splitlines()[0]}")
        sys.stdout.buffer.write(model.getvalue())
    else:
        processor = sentencepiece.SentencePieceProcessor(model_file=argument)
        for line in io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", newline="\n"):
            print(*processor.encode(line.rstrip("\n"), out_type=str))


if __name__ == "__main__":
    main()
