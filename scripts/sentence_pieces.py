"""Subwords without a tokeniser: trains a joint SentencePiece model, or splits text by one.

    python scripts/sentence_pieces.py train VOCABULARY FILE [FILE ...] > MODEL
    python scripts/sentence_pieces.py encode MODEL < TEXT > PIECES

The sentencepiece package has no command line. Unigram model of the default normalisation (NFKC); every character is
covered, as French and German have few; trained on up to 10 million lines drawn at random.
"""

import io
import sys

import sentencepiece


def main() -> None:
    command, argument, *files = sys.argv[1:]
    if command == "train":
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
