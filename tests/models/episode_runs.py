"""Rows computed over the pages of an episode, by hand; a conversation with planted topics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from worker.engine.plan import SampleRow, StepPlan
from worker.engine.sampling import SamplingParams
from worker.models.llama import LlamaModel


def logits(
    model: LlamaModel, pages: Sequence[int], stored: int, ids: Sequence[int], first: int
) -> torch.Tensor:
    """[len(ids), vocab] of ids at logical positions first .., behind `stored` tokens of a table
    that begins with these pages; what follows goes to pages that are not among them."""
    blocks = len(model._pools.pools[0])
    table = [*pages, *(block for block in range(blocks) if block not in set(pages))]
    places = range(stored, stored + len(ids))
    slots = [table[at // 16] * 16 + at % 16 for at in places]
    params = SamplingParams(seed=0, max_tokens=1)
    plan = StepPlan.of_lists(
        1, ids, range(first, first + len(ids)), [0, len(ids)], [stored + len(ids)], [[table]],
        [slots], samples=[SampleRow(row, 0, 0, row, params) for row in range(len(ids))],
    )  # fmt: skip
    return model.execute(plan).clone()


# What is said of each topic, in pairs: what Anna says and what Ben says.
TOPICS: dict[str, list[tuple[str, str]]] = {
    "bees": [
        (
            "My sister Clara keeps bees behind her house in Norwich, and she has nine hives.",
            "Nine hives is a lot of bees! Does Clara sell the honey from her hives?",
        ),
        (
            "Clara sells her honey to a shop called The Copper Kettle, which pays seven pounds a jar.",
            "Seven pounds for a jar of honey, so the bees pay for themselves.",
        ),
        (
            "The bees fly to the lavender field of a farmer, Mr. Pemberton, so the honey is purple.",
            "Purple honey from lavender! I would like to taste what her bees make.",
        ),
        (
            "Her oldest queen bee is called Matilda, and Clara has painted a green dot on her back.",
            "A queen bee with a dot. How does Clara find her between the bees of a hive?",
        ),
    ],
    "boat": [
        (
            "In August we sail our boat from Plymouth to Brest; the boat is called Grey Heron.",
            "Is the Grey Heron the boat with the red sail that was in the harbour?",
        ),
        (
            "Yes, the boat has a red sail, but the mast broke in a storm and a new one is of spruce.",
            "A spruce mast! Who repairs the boat and its mast in the harbour?",
        ),
        (
            "A boatbuilder named Olaf repairs the mast, and the harbour lets him work in dock eleven.",
            "Olaf in dock eleven, I know his yard: he repaired the sail of my uncle's boat.",
        ),
        (
            "We sail with a crew of five, and our captain on the boat will be my cousin Ingrid.",
            "Captain Ingrid! With her the boat will reach the harbour in any storm.",
        ),
    ],
    "bakery": [
        (
            "I begin work at the bakery of Signora Bellini at four in the morning, baking rye bread.",
            "Bread at four in the morning! Is the oven of the bakery hot by then?",
        ),
        (
            "The oven of the bakery is heated with cherry wood, which gives the rye bread its smell.",
            "Cherry wood in the oven, so that is why the bread from there is so good.",
        ),
        (
            "On Fridays the bakery makes a cake with figs that is called the Sultan, for the mayor.",
            "The Sultan cake with figs! Does the mayor eat a whole cake every Friday?",
        ),
        (
            "The apprentice who kneads the dough at the bakery, Tobias, comes from Salzburg.",
            "Tobias kneads the dough very well, the bread was never so light.",
        ),
    ],
    "stars": [
        (
            "Our astronomy club has bought a telescope, a mirror of thirty centimetres, from Jena.",
            "A telescope with such a mirror shows the rings of a planet, does it not?",
        ),
        (
            "With the telescope we saw Neptune on Tuesday, a small blue dot between the stars.",
            "Neptune! I have seen only the planet Jupiter and the brightest stars.",
        ),
        (
            "The telescope stands in the dome on Raven Hill, where no lamp outshines the stars.",
            "Raven Hill is dark, the sky there is full of stars, and the dome keeps off the wind.",
        ),
        (
            "The president of the astronomy club is Doctor Okafor, who found a comet in 1998.",
            "A comet! Is it named after Doctor Okafor, as comets are after those who find them?",
        ),
    ],
}
# Questions as a text goes on, and what the right next words are.
QUESTIONS: dict[str, list[tuple[str, str]]] = {
    "bees": [
        ("Ben: In which town does Clara keep her bees?\nAnna: Clara keeps her bees in", " Norwich"),
        ("Ben: What is the queen bee of Clara called?\nAnna: The queen bee is called", " Matilda"),
        ("Ben: Which shop buys the honey?\nAnna: Clara sells her honey to a shop called The",
         " Copper Kettle"),
        ("Ben: Whose lavender field do the bees fly to?\nAnna: The lavender field of Mr.",
         " Pemberton"),
    ],
    "boat": [
        ("Ben: What is your boat called?\nAnna: Our boat is called Grey", " Heron"),
        ("Ben: Where do you sail with the boat?\nAnna: We sail from Plymouth to", " Brest"),
        ("Ben: Who repairs the mast in the harbour?\nAnna: A boatbuilder named", " Olaf"),
        ("Ben: Who is the captain on the boat?\nAnna: Our captain is my cousin", " Ingrid"),
    ],
    "bakery": [
        ("Ben: Whose bakery do you work at?\nAnna: I work at the bakery of Signora", " Bellini"),
        ("Ben: With what is the oven of the bakery heated?\nAnna: The oven is heated with",
         " cherry wood"),
        ("Ben: What is the cake with figs called?\nAnna: The cake with figs is called the",
         " Sultan"),
        ("Ben: Where does the apprentice who kneads the dough come from?\nAnna: Tobias comes from",
         " Salzburg"),
    ],
    "stars": [
        ("Ben: Which planet did you see with the telescope?\nAnna: With the telescope we saw",
         " Neptune"),
        ("Ben: Where does the dome with the telescope stand?\nAnna: The telescope stands on",
         " Raven Hill"),
        ("Ben: Who is the president of the astronomy club?\nAnna: The president is Doctor",
         " Okafor"),
        ("Ben: In which town was the telescope made?\nAnna: The telescope with its mirror is from",
         " Jena"),
    ],
}  # fmt: skip


def planted() -> str:
    """The conversation: topics by turns, two pairs of utterances each time."""
    lines = []
    for part in (0, 2):
        for said in TOPICS.values():
            for anna, ben in said[part : part + 2]:
                lines += [f"Anna: {anna}", f"Ben: {ben}"]
    return "\n".join(lines) + "\n"
