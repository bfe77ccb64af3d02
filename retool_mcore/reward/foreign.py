"""Sentences in other languages that only say what the answer is: ``La respuesta es 12``.

Of a sentence with a verb of remaining or being there, the number behind it is the answer: ``Es
bleiben 12 Äpfel``. What denies or compares is not read: ``La respuesta no es 12``.
"""

import re

_ANSWERS = (
    r"(?:la |le |l['’]|die |das |der |el |a |il |o )?(?:respuesta|r[ée]ponse|antwort|resposta|risposta|resultado|"
    r"r[ée]sultat|ergebnis|risultato|soluci[óo]n|solution|l[öo]sung|valor|valeur|wert|total|jibu|jawaban(?:nya)?|"
    r"ответ|результат|решение|значение|答え|答案|正解|정답|답|उत्तर|उत्तर|জবাব|উত্তর|คำตอบ|సమాధానం|đáp án|cevap)"
    r"(?: final| correcta?| finale| ist gleich)?"
)
_BEING = (
    r"(?:es igual a|est [ée]gale? [àa]|es|est|ist|è|é|ni|adalah|это|равен|равна|равно|は|が|은|는|है|হল|হলো|คือ|là|[:=])"
)
_LEFT = (
    r"(?:quedan?|quedar[áa]n?|hay|son|tiene|tendr[áa]|gana|gast[óo]|es bleiben|es sind|es gibt|bleiben|insgesamt|"
    r"il (?:lui |leur )?reste(?:ra)?|il y a|elle (?:gagne|a)|il (?:gagne|a)|restam|há|ci sono|rimangono|"
    r"осталось|остан(?:ется|утся)|оста[её]тся|всего|残りは|合計で?)"
)
_VALUE = r"(?=[-$€£\\(\[{]|\d)"
_ANSWER = re.compile(rf"\A{_ANSWERS}\s?{_BEING}[:=]?\s{{0,2}}{_VALUE}", re.IGNORECASE)
_REMAINS = re.compile(rf"\A{_LEFT}\s?{_VALUE}", re.IGNORECASE)
_POLITE = re.compile(r"(?<=\S)\s?(?:です|である|だ|입니다|이다)\Z")
_CHANCES = re.compile(r"\b(?:no|nicht|pas|kein|mehr|más|plus|menos|moins|weniger|o|ou|oder|или|не)\b", re.IGNORECASE)


def said_abroad(text: str) -> str | None:
    """What a sentence in another language says the answer is; None for any other text."""
    if not text.isascii() and (match := _POLITE.search(text)):
        return text[: match.start()]
    match = _ANSWER.match(text) or _REMAINS.match(text)
    if match is None or _CHANCES.search(text, match.end()):
        return None
    return text[match.end() :]
