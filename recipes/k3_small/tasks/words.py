"""Word lists that the tasks draw from."""

__all__ = ["CITIES", "COLORS", "DEPARTMENTS", "ITEMS", "MONTHS", "NAMES", "ORDINALS"]


def split_words(text: str) -> list[str]:
    """The words of a constant below."""
    return text.split()


NAMES = split_words(
    "Abel Agnes Alma Amos Anton Arlo Astrid Basil Bea Bruno Camille Carlo Cecil Clara Cyrus Daphne Dario Delia "
    "Dora Edgar Edith Elias Elsa Emil Enid Esther Ezra Fay Felix Fiona Flora Frank Greta Gus Hana Hazel Helen "
    "Henry Hilda Ida Igor Irene Iris Ivan Jack Jane Jasper Joan Jonas Judith Julia Kamal Kira Lars Leo Lily Louis "
    "Lucia Luna Mabel Marco Maria Martha Max Mina Miriam Mona Nadia Ned Nina Noel Olga Omar Oscar Otis Paula "
    "Percy Peter Priya Ralph Ravi Rita Robin Ruth Sami Sara Simon Sofia Stella Tariq Tess Theo Tilda Toby Uma "
    "Ursula Vera Victor Viola Walter Wanda Willa Yusuf Yvonne Zara Zelda Ada Cora Finn Hugo Ines Karl Lena Milo "
    "Nora Otto Pia Rosa Sven Tara"
)
CITIES = split_words(
    "Accra Aden Ankara Athens Baku Bath Berlin Bern Bogota Boston Bristol Brno Bruges Bucharest Cadiz Cali "
    "Chicago Cologne Cork Crete Dallas Denver Derby Dover Dublin Dundee Durban Exeter Fargo Florence Galway "
    "Geneva Genoa Graz Hamburg Havana Helsinki Hobart Houston Kiel Kobe Krakow Lagos Leipzig Lisbon London Lyon "
    "Madrid Manila Memphis Milan Minsk Monaco Nairobi Naples Nice Odessa Oxford Palermo Paris Parma Pisa Plymouth "
    "Prague Reno Riga Rome Salem Santos Seville Siena Sofia Sparta Sydney Tokyo Toledo Toronto Trieste Turku "
    "Utrecht Valencia Vienna Vigo Warsaw York Zagreb Zurich Oslo Lima Cairo Quito Delhi Osaka Porto Bergen Ghent "
    "Dakar Hanoi Leeds Perth"
)
DEPARTMENTS = split_words(
    "sales support legal design finance research marketing security training logistics planning purchasing "
    "testing accounts production kitchen library"
)
COLORS = split_words("red blue green yellow black white brown orange purple grey pink silver golden crimson violet")
ITEMS = split_words(
    "apples pears books pencils marbles stamps coins shells cards stickers buttons oranges cookies eggs tickets "
    "bottles candles flowers balloons postcards beads lemons plums stones cups plates"
)
ORDINALS = split_words("first second third fourth fifth sixth seventh eighth ninth tenth")
MONTHS = split_words("January February March April May June July August September October November December")
