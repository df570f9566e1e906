"""A conversation with planted topics, and questions whose answers lie in one of them."""

from __future__ import annotations

# What Anna and Ben say of each topic, by turns.
TOPICS = {
    "bees": """
Anna: My sister Clara keeps bees behind her house in Norwich, and she has nine hives.
Ben: Nine hives is a lot of bees! Does Clara sell the honey from her hives?
Anna: Clara sells her honey to a shop called The Copper Kettle, which pays seven pounds a jar.
Ben: Seven pounds for a jar of honey, so the bees pay for themselves.
Anna: The bees fly to the lavender field of a farmer, Mr. Pemberton, so the honey is purple.
Ben: Purple honey from lavender! I would like to taste what her bees make.
Anna: Her oldest queen bee is called Matilda, and Clara has painted a green dot on her back.
Ben: A queen bee with a dot. How does Clara find her between the bees of a hive?
""",
    "boat": """
Anna: In August we sail our boat from Plymouth to Brest; the boat is called Grey Heron.
Ben: Is the Grey Heron the boat with the red sail that was in the harbour?
Anna: Yes, the boat has a red sail, but the mast broke in a storm and a new one is of spruce.
Ben: A spruce mast! Who repairs the boat and its mast in the harbour?
Anna: A boatbuilder named Olaf repairs the mast, and the harbour lets him work in dock eleven.
Ben: Olaf in dock eleven, I know his yard: he repaired the sail of my uncle's boat.
Anna: We sail with a crew of five, and our captain on the boat will be my cousin Ingrid.
Ben: Captain Ingrid! With her the boat will reach the harbour in any storm.
""",
    "bakery": """
Anna: I begin work at the bakery of Signora Bellini at four in the morning, baking rye bread.
Ben: Bread at four in the morning! Is the oven of the bakery hot by then?
Anna: The oven of the bakery is heated with cherry wood, which gives the rye bread its smell.
Ben: Cherry wood in the oven, so that is why the bread from there is so good.
Anna: On Fridays the bakery makes a cake with figs that is called the Sultan, for the mayor.
Ben: The Sultan cake with figs! Does the mayor eat a whole cake every Friday?
Anna: The apprentice who kneads the dough at the bakery, Tobias, comes from Salzburg.
Ben: Tobias kneads the dough very well, the bread was never so light.
""",
    "stars": """
Anna: Our astronomy club has bought a telescope, a mirror of thirty centimetres, from Jena.
Ben: A telescope with such a mirror shows the rings of a planet, does it not?
Anna: With the telescope we saw Neptune on Tuesday, a small blue dot between the stars.
Ben: Neptune! I have seen only the planet Jupiter and the brightest stars.
Anna: The telescope stands in the dome on Raven Hill, where no lamp outshines the stars.
Ben: Raven Hill is dark, the sky there is full of stars, and the dome keeps off the wind.
Anna: The president of the astronomy club is Doctor Okafor, who found a comet in 1998.
Ben: A comet! Is it named after Doctor Okafor, as comets are after those who find them?
""",
}
# Questions as a text goes on, and what the right next words are.
QUESTIONS: dict[str, list[tuple[str, str]]] = {
    "bees": [
        (
            "Ben: In which town does Clara keep her bees?\nAnna: Clara keeps her bees in",
            " Norwich",
        ),
        (
            "Ben: What is the queen bee of Clara called?\nAnna: The queen bee is called",
            " Matilda",
        ),
        (
            "Ben: Which shop buys the honey?\nAnna: Clara sells her honey to a shop called The",
            " Copper Kettle",
        ),
        (
            "Ben: Whose lavender field do the bees fly to?\nAnna: The lavender field of Mr.",
            " Pemberton",
        ),
    ],
    "boat": [
        (
            "Ben: What is your boat called?\nAnna: Our boat is called Grey",
            " Heron",
        ),
        (
            "Ben: Where do you sail with the boat?\nAnna: We sail from Plymouth to",
            " Brest",
        ),
        (
            "Ben: Who repairs the mast in the harbour?\nAnna: A boatbuilder named",
            " Olaf",
        ),
        (
            "Ben: Who is the captain on the boat?\nAnna: Our captain is my cousin",
            " Ingrid",
        ),
    ],
    "bakery": [
        (
            "Ben: Whose bakery do you work at?\nAnna: I work at the bakery of Signora",
            " Bellini",
        ),
        (
            "Ben: With what is the oven of the bakery heated?\nAnna: The oven is heated with",
            " cherry wood",
        ),
        (
            "Ben: What is the cake with figs called?\nAnna: The cake with figs is called the",
            " Sultan",
        ),
        (
            "Ben: Where does the apprentice who kneads the dough come from?\n"
            "Anna: Tobias comes from",
            " Salzburg",
        ),
    ],
    "stars": [
        (
            "Ben: Which planet did you see with the telescope?\nAnna: With the telescope we saw",
            " Neptune",
        ),
        (
            "Ben: Where does the dome with the telescope stand?\nAnna: The telescope stands on",
            " Raven Hill",
        ),
        (
            "Ben: Who is the president of the astronomy club?\nAnna: The president is Doctor",
            " Okafor",
        ),
        (
            "Ben: In which town was the telescope made?\n"
            "Anna: The telescope with its mirror is from",
            " Jena",
        ),
    ],
}


def planted() -> str:
    """The conversation: topics by turns, four utterances each time."""
    spoken = [said.strip().splitlines() for said in TOPICS.values()]
    lines = [line for first in (0, 4) for said in spoken for line in said[first : first + 4]]
    return "\n".join(lines) + "\n"
