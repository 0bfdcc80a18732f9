"""Rules for text in any language: characters, lower case, tokenisers for BLEU, and how subwords become text again.

docs/languages.md describes these rules for users.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Literal

# ---- codes of languages

# {other code of a language: the code that is used in this file}. FLORES and NLLB use codes of three letters. cn and jp
# are frequent mistakes.
CODES = {
    "cmn": "zh", "zho": "zh", "cn": "zh", "jpn": "ja", "jp": "ja", "kor": "ko",
    "tha": "th", "lao": "lo", "khm": "km", "mya": "my", "bod": "bo", "dzo": "dz",
    "tur": "tr", "aze": "az", "azj": "az", "lit": "lt",
    "tat": "tt", "kaz": "kk", "bak": "ba", "kir": "ky",
}  # fmt: skip
# Languages whose text Moses' detokeniser restores exactly. Moses has rules for more languages, but it adds or removes
# spaces next to apostrophes in Dutch (foto's), Italian (un po' di), Greek, Catalan, Irish and Tetum, next to colons in
# Finnish and Swedish (EU:s), before the full stop in languages of India, and before all punctuation in Chinese.
MOSES = ["cs", "de", "en", "es", "et", "fr", "hu", "is", "lt", "lv", "pl", "pt", "ro", "ru", "sk", "sl"]
# Languages whose Latin alphabet has two letters i: I, whose lower case is ı, and İ, whose lower case is i. Most of them
# are written in another alphabet too.
DOTLESS_I = {
    "tr", "az", "azb", "gag", "crh", "tt", "kk", "kaa", "ba", "ky", "kum", "krc", "nog", "alt", "kjh", "tyv", "sah",
    "slr", "klj", "kmz", "uum", "ota", "bgx",  # Turkic
    "zza", "diq", "kiu", "tly", "ttt", "jdt",  # Zazaki, Talysh, Tat
}  # fmt: skip
# {language: sacreBLEU's tokeniser for it}. Other languages have the tokeniser 13a, which splits text at spaces.
TOKENIZERS = {
    "zh": "zh", "yue": "zh", "wuu": "zh", "lzh": "zh", "hak": "zh", "gan": "zh", "hsn": "zh",
    "ja": "ja-mecab", "ko": "ko-mecab",
    "th": "char", "lo": "char", "km": "char", "my": "char", "bo": "char", "dz": "char",
}  # fmt: skip
# Scripts without spaces between words. A script is named by the first word of its characters' names in Unicode: "TAI"
# stands for Tai Le, Tai Tham and Tai Viet, and "NEW" for New Tai Lue.
UNSPACED_SCRIPTS = {
    "AHOM", "BALINESE", "BOPOMOFO", "CJK", "HIRAGANA", "JAVANESE", "KATAKANA", "KHMER", "LAO", "MYANMAR", "NEW",
    "NUSHU", "TAI", "TANGUT", "THAI", "TIBETAN", "YI",
}  # fmt: skip
# {code of a script in the code of a language, as in shn_Mymr or zho-Hant: the name of the script as above}
SCRIPT_CODES = {
    "ahom": "AHOM", "bali": "BALINESE", "bopo": "BOPOMOFO", "hani": "CJK", "hans": "CJK", "hant": "CJK",
    "hira": "HIRAGANA", "hrkt": "HIRAGANA", "jpan": "HIRAGANA", "java": "JAVANESE", "kana": "KATAKANA",
    "khmr": "KHMER", "laoo": "LAO", "mymr": "MYANMAR", "talu": "NEW", "nshu": "NUSHU", "lana": "TAI", "tale": "TAI",
    "tavt": "TAI", "tang": "TANGUT", "thai": "THAI", "tibt": "TIBETAN", "yiii": "YI",
}  # fmt: skip
MOST_LETTERS_PER_WORD = 25  # on average; no language with spaces between words has longer words


def base_code(language: str) -> str:
    """Returns the code of a language without script and country, such as "zh" for zh_CN, zh-Hans and zho_Hant."""
    code = re.split("[-_]", language.lower())[0]
    return CODES.get(code, code)


def script_code(language: str) -> str:
    """Returns the code of the script that is part of a language's code, such as "hant" for zho_Hant, otherwise ""."""
    parts = re.split("[-_]", language.lower())[1:]
    scripts = [part for part in parts if len(part) == 4 and part.isalpha()]
    return scripts[0] if scripts else ""


# ---- characters

CONTROLS = [*range(0x20), *range(0x7F, 0xA0)]
# invisible characters that have no influence on the letters next to them: soft hyphen, zero-width space, word joiner,
# byte-order mark
NO_WIDTH = [0xAD, 0x200B, 0x2060, 0xFEFF]
# marks for the direction of writing
DIRECTIONS = [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F)]
# invisible operators of mathematics, and formatting characters that are no longer part of Unicode
INVISIBLE = [*range(0x2061, 0x2070)]
SPACES = [code for code in range(0x21, 0x3001) if chr(code).isspace()]
# tabs; all characters that some program takes for the end of a line; and U+2581, which SentencePiece writes for a space
CHARACTERS_LIKE_SPACES = "\t\n\v\f\r\x1c\x1d\x1e\x1f\x85\u2028\u2029\u2581"


def replacements() -> dict[str, str]:
    """Returns {character: its replacement} for all characters that are replaced or removed when text is prepared.

    Some characters are in several of the groups below. The last group decides.
    """
    table: dict[str, str] = {}
    for code in (*CONTROLS, *NO_WIDTH, *DIRECTIONS, *INVISIBLE):
        table[chr(code)] = ""
    # In Windows-1252, these codes are punctuation marks: the quotation mark “ is 0x93. If a program has read such text
    # as Latin 1, the mark has become the control character U+0093. For the five codes that Windows-1252 does not
    # define, "ignore" returns "".
    for code in range(0x80, 0xA0):
        table[chr(code)] = bytes([code]).decode("cp1252", "ignore")
    for code in SPACES:
        table[chr(code)] = " "
    for character in CHARACTERS_LIKE_SPACES:
        table[character] = " "
    return table


TABLE = replacements()
# In scripts without spaces between words, a zero-width space may mark the end of a word, and belongs to the spelling.
# These are the blocks from Thai to Myanmar, Khmer, New Tai Lue, Tai Tham, Balinese, Javanese and Tai Viet.
UNSPACED = "\u0e00-\u109f\u1780-\u17ff\u1950-\u19ff\u1a20-\u1aaf\u1b00-\u1b7f\ua980-\ua9ff\uaa60-\uaadf"
USELESS_ZERO_WIDTH_SPACE = f"(?<![{UNSPACED}])\u200b(?![{UNSPACED}])|(?<!\\S)\u200b|\u200b(?!\\S)"
REPLACED = re.compile(f"[{re.escape(''.join(set(TABLE) - {chr(0x200B)}))}]|{USELESS_ZERO_WIDTH_SPACE}")
# text of characters that are invisible on their own: joiners, fillers, vowels without a form, variation selectors
UNSEEN = re.compile(
    "[ \u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200c\u200d\u2800\u3164\ufe00-\ufe0f\uffa0\U000e0000-\U000e0fff]*"
)
# Runs of characters other than "compatibility ideographs". These are variants of Chinese characters that look different
# and occur in names. Unicode's normal forms would replace them.
NO_COMPATIBILITY_IDEOGRAPHS = re.compile("[^\uf900-\ufaff\U0002f800-\U0002fa1f]+")


def one_line(text: str) -> str:
    """Returns a text in the form in which all text is prepared, scored and translated.

    The text gets one line, single spaces, and Unicode's normal form NFC. Control characters and the like are removed. A
    text without any visible character becomes an empty text.
    """
    text = re.sub("\u200b+", "\u200b", text)  # several zero-width spaces become one
    text = REPLACED.sub(lambda match: TABLE[match[0]], text)
    text = " ".join(normalize("NFC", text).split())
    return "" if UNSEEN.fullmatch(text) else text


def normalize(form: Literal["NFC", "NFD"], text: str) -> str:
    """Returns a text in Unicode's normal form NFC or NFD, except that compatibility ideographs are not replaced."""
    return NO_COMPATIBILITY_IDEOGRAPHS.sub(lambda match: unicodedata.normalize(form, match[0]), text)


def has_separate_accents(text: str) -> bool:
    """Returns whether the normal form NFC joins several characters of a text, such as a letter and an accent."""
    return "".join(normalize("NFC", character) for character in text) != normalize("NFC", text)


def has_canonical_variants(text: str) -> bool:
    """Returns whether NFC replaces single characters of a text, such as the ohm sign by the Greek letter omega."""
    return any(normalize("NFC", character) != character for character in text)


# ---- lower case


def lower(text: str, language: str) -> str:
    """Returns a text in lower case, by the rules of its language. The text has to be in Unicode's normal form NFC."""
    if "I" in text and has_dotless_i(text, language):
        text = text.replace("I", "ı")
    if base_code(language) == "lt":  # in Lithuanian, i and j keep their dot under an accent
        text = re.sub("([IJ]\u0328?)(?=[\u0300\u0301\u0303])", "\\1\u0307", normalize("NFD", text))
    return normalize("NFC", text.replace("İ", "i").lower())


def has_dotless_i(text: str, language: str) -> bool:
    """Returns whether the letter I of a text becomes ı in lower case, as in Turkish, and not i, as in English.

    - Most languages do not have the letter ı.
    - The other languages have it only in the Latin script. The code of a language may name the script: Kazakh is
      "kaz_Latn" or "kaz_Cyrl".
    - If the code names no script, the script of the text decides. In a Kazakh text that is mostly Cyrillic, a Latin
      word is a name or an English word, and its I becomes i.
    """
    if base_code(language) not in DOTLESS_I:
        return False
    script = script_code(language)
    if script == "latn":
        return True
    if script in ("cyrl", "arab", "hebr"):  # Cyrillic, Arabic, Hebrew: the other scripts of these languages
        return False
    return is_mostly_latin(text)


def is_mostly_latin(text: str) -> bool:
    """Returns whether more than half of the letters of a text are Latin letters."""
    letters = [character for character in text if character.isalpha()]
    latin_letters = [letter for letter in letters if script_name(letter) == "LATIN"]
    return len(latin_letters) > len(letters) / 2


def script_name(character: str) -> str:
    """Returns the first word of a character's name in Unicode. For letters, it is the name of the script."""
    return unicodedata.name(character, "").split(" ")[0]


# ---- words


def bleu_tokenizer(language: str, text: Iterable[str] = ()) -> str:
    """Returns the name of sacreBLEU's tokeniser for a language.

    It is chosen by the code of the language, or else by the script that is part of the code, or else by the script of
    `text`. If the words of a text have no spaces between them, characters are scored instead of words.

    Args:
        language: the code of the language.
        text: the lines of the reference translations.
    """
    code = base_code(language)
    if code in TOKENIZERS:
        return TOKENIZERS[code]
    unspaced_script = SCRIPT_CODES.get(script_code(language))  # None if the code names no such script
    if unspaced_script == "CJK":
        return "zh"
    if unspaced_script:
        return "char"
    return _tokenizer_for_text(text)


def _tokenizer_for_text(text: Iterable[str]) -> str:
    """Returns the name of sacreBLEU's tokeniser for a text in an unknown language. `text`: its lines."""
    number_of_words = 0  # a "word" is what stands between two spaces; in some languages it is a whole sentence
    letters_by_script: Counter[str] = Counter()
    for line in text:
        number_of_words += len(line.split())
        letters_by_script.update(script_name(character) for character in line if character.isalpha())
    tokenizer = _tokenizer_for_scripts(letters_by_script)
    # 13a splits text at spaces. If the words are too long on average, this is the text of a script without spaces
    # between words that UNSPACED_SCRIPTS does not have.
    words_are_too_long = letters_by_script.total() > MOST_LETTERS_PER_WORD * number_of_words
    if tokenizer == "13a" and words_are_too_long:
        return "char"
    return tokenizer


def _tokenizer_for_scripts(letters_by_script: Counter[str]) -> str:
    """Returns sacreBLEU's tokeniser for a text. `letters_by_script`: {name of a script: number of its letters}."""
    letters_in_unspaced = sum(letters_by_script[name] for name in UNSPACED_SCRIPTS)
    if 2 * letters_in_unspaced <= letters_by_script.total():  # at most half of the letters
        return "13a"
    # sacreBLEU's tokeniser for Chinese makes words of Chinese characters, but not of the kana of Japanese
    if 10 * letters_by_script["CJK"] >= 9 * letters_in_unspaced:  # at least nine tenths of them
        return "zh"
    return "char"


# ---- subwords


def join_subwords(line: str, kind: str, language: str) -> str:
    """Returns the text that a line of subwords stands for, exactly as fairseq-generate makes text of subwords.

    Args:
        line: subwords with spaces between them.
        kind: "bpe" for BPE of words by Moses' tokeniser, or "sentencepiece".
        language: the code of the language, for Moses' detokeniser.
    """
    if kind == "sentencepiece":
        joined = line.replace(" ", "")
        return joined.replace("\u2581", " ").strip()  # SentencePiece writes U+2581 for a space
    from sacremoses import MosesDetokenizer

    words = without_bpe(line).split()
    return str(MosesDetokenizer(language).detokenize(words))


def without_bpe(line: str) -> str:
    """Joins a line of BPE's subwords, such as "a@@ b c", to words, such as "ab c", and returns these."""
    return f"{line} ".replace("@@ ", "").strip()
