"""Functions and calls as the Berkeley Function Calling Leaderboard has them, written for our tests.

Its schemas name types as Python and Java do; `as_sent` makes of them what its client sends. Each
request has functions and the calls that answer it: one function and one call (simple), several
functions (multiple), several calls (parallel), or both.
"""

from typing import Any

Schema = dict[str, Any]
Called = tuple[str, dict[str, Any]]

TYPES = {
    "dict": "object",
    "float": "number",
    "double": "number",
    "tuple": "array",
    "list": "array",
    "ArrayList": "array",
    "HashMap": "object",
    "String": "string",
    "bool": "boolean",
    "long": "integer",
    "any": "string",
}


def as_sent(schema: Any) -> Any:
    """The schema in JSON Schema's types. For floats the leaderboard's client also sends the
    format."""
    if isinstance(schema, list):
        return [as_sent(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    sent = {key: as_sent(each) for key, each in schema.items()}
    kind = schema.get("type")
    if isinstance(kind, str):
        sent["type"] = TYPES.get(kind, kind)
        if kind == "float":
            sent["format"] = "float"
    return sent


def tool_of(function: Schema) -> Schema:
    return {"type": "function", "function": as_sent(function)}


def of(kind: str, description: str = "", **more: Any) -> Schema:
    return {"type": kind, **({"description": description} if description else {}), **more}


def function(
    name: str, description: str, properties: Schema, *, optional: tuple[str, ...] = ()
) -> Schema:
    required = [each for each in properties if each not in optional]
    parameters = {"type": "dict", "properties": properties, "required": required}
    return {"name": name, "description": description, "parameters": parameters}


FACTORIAL = function(
    "math.factorial", "The factorial of a number.", {"number": of("integer", "At least 0.")}
)
HYPOT = function(
    "math.hypot",
    "The Euclidean norm of two or three numbers.",
    {"x": of("float"), "y": of("float"), "z": of("float", "0 where there is none.", default=0)},
    optional=("z",),
)
GCD = function("math.gcd", "The greatest common divisor.", {"a": of("long"), "b": of("long")})
TRIANGLE = function(
    "geometry.triangle-area",
    "The area of a triangle.",
    {"base": of("integer"), "height": of("integer"), "unit": of("string", default="units")},
    optional=("unit",),
)
ROOTS = function(
    "algebra.quadratic_roots",
    "The roots of a x² + b x + c.",
    {
        "a": of("integer"),
        "b": of("integer"),
        "c": of("integer"),
        "root_type": of("string", "Which of them.", enum=["real", "all"], default="real"),
    },
    optional=("root_type",),
)
INTEGRAL = function(
    "calculus.integrate",
    "The integral of a function of x over an interval, by the given rule.",
    {
        "function": of("string", "In Python's notation, such as 'lambda x: x**2'."),
        "interval": of("tuple", "Lower and upper bound.", items=of("float")),
        "method": of("string", enum=["trapezoid", "simpson", "Gauß-Legendre"]),
    },
    optional=("method",),
)
MATRIX = function(
    "numpy.linalg.matmul",
    "The product of two matrices.",
    {
        "left": of("array", "Rows.", items=of("array", items=of("float"))),
        "right": of("array", "Rows.", items=of("array", items=of("float"))),
    },
)
STATISTICS = function(
    "statistics.describe",
    "Statistics of numbers.",
    {
        "values": of("list", items=of("integer")),
        "which": of("array", items=of("string", enum=["mean", "median", "mode", "stdev"])),
        "is_sample": of("bool", default=False),
    },
    optional=("which", "is_sample"),
)
WEATHER = function(
    "get_current_weather",
    "The weather of now at a place.",
    {
        "location": of("string", "City and country, such as 'Zürich, Schweiz' or '東京, 日本'."),
        "unit": of("string", enum=["celsius", "fahrenheit"]),
    },
    optional=("unit",),
)
FORECAST = function(
    "weather.forecast",
    "The weather of the next days.",
    {
        "coordinates": of("tuple", "Latitude and longitude in degrees.", items=of("float")),
        "days": of("integer", "From 1 to 14.", minimum=1, maximum=14, default=3),
        "include": of("dict", properties={"wind": of("bool"), "uv_index": of("bool")}),
    },
    optional=("days", "include"),
)
FLIGHTS = function(
    "flights.search",
    "Flights between two airports.",
    {
        "from": of("string", "IATA code."),
        "to": of("string", "IATA code."),
        "date": of("string", "YYYY-MM-DD."),
        "passengers": of(
            "array",
            items=of(
                "dict",
                properties={
                    "kind": of("string", enum=["adult", "child", "infant"]),
                    "age": of("integer"),
                    "seat": of("dict", properties={"row": of("integer"), "letter": of("string")}),
                },
                required=["kind"],
            ),
        ),
        "max_price": of("float", "In euros.", default=1000.0),
    },
    optional=("max_price",),
)
HOTEL = function(
    "hotel.book",
    "Books rooms at a hotel.",
    {
        "hotel_id": of("string"),
        "stay": of(
            "dict",
            properties={
                "check_in": of("string", "YYYY-MM-DD."),
                "nights": of("integer"),
                "guests": of(
                    "array",
                    items=of(
                        "dict",
                        properties={"name": of("string"), "is_child": of("bool")},
                        required=["name", "is_child"],
                    ),
                ),
            },
            required=["check_in", "nights", "guests"],
        ),
        "wishes": of("array", items=of("string"), default=[]),
    },
    optional=("wishes",),
)
RESTAURANTS = function(
    "find_restaurants",
    "Restaurants near a place. " + "They are sorted by distance, the nearest one first. " * 20,
    {
        "near": of("string"),
        "cuisine": of("string", enum=["italienisch", "français", "日本料理", "हिन्दी", "any"]),
        "dietary_conditions": of("array", items=of("string", enum=["Vegan", "Halal", "Kosher"])),
        "is_open": of("bool", default=True),
    },
    optional=("cuisine", "dietary_conditions", "is_open"),
)
ORDER = function(
    "ChaFod",
    "Orders food.",
    {
        "TheFod": of("string", enum=["PIZZA", "BURGER", "SUSHI"]),
        "amount": of("integer"),
        "Extras": of("HashMap", "By extra, how many.", properties={"cheese": of("integer")}),
    },
    optional=("Extras",),
)
CALENDAR = function(
    "calendar.create-event",
    "Creates an event.",
    {
        "title": of("string"),
        "start": of("string", "ISO 8601."),
        "attendees": of("array", items=of("string"), default=[]),
        "reminder_minutes": of("integer", default=10),
        "recurrence": of(
            "dict",
            properties={
                "frequency": of("string", enum=["daily", "weekly"]),
                "until": of("string"),
            },
            required=["frequency"],
        ),
    },
    optional=("attendees", "reminder_minutes", "recurrence"),
)
MAIL = function(
    "send_email",
    "Sends a mail.",
    {
        "to": of("array", items=of("string")),
        "subject": of("string"),
        "body": of("string", "Plain text, lines and all."),
        "attachments": of(
            "array",
            items=of(
                "dict",
                properties={"name": of("string"), "bytes": of("integer")},
                required=["name"],
            ),
        ),
        "is_urgent": of("bool", default=False),
    },
    optional=("attachments", "is_urgent"),
)
SQL = function(
    "sql.execute",
    "Executes one statement.",
    {
        "sql_keyword": of("string", enum=["SELECT", "INSERT", "UPDATE", "DELETE", "CREATE"]),
        "table_name": of("string"),
        "columns": of("array", items=of("string")),
        "insert_values": of("array", items=of("array", items=of("any"))),
        "conditions": of("array", "Such as 'age > 21'.", items=of("string")),
    },
    optional=("columns", "insert_values", "conditions"),
)
GIT = function(
    "git_commit",
    "Commits changes.",
    {
        "message": of("string"),
        "paths": of("ArrayList", items=of("String")),
        "amend": of("bool"),
    },
    optional=("paths", "amend"),
)
PYTHON = function("run_python", "Runs code.", {"code": of("string", "Source, with its newlines.")})
STOCK = function(
    "finance.stock_price",
    "Prices of a share.",
    {
        "company": of("string"),
        "days": of("integer"),
        "data_type": of("string", enum=["Open", "Close", "High", "Low"]),
    },
    optional=("data_type",),
)
LOAN = function(
    "finance.loan.monthly_payment",
    "What is paid each month.",
    {"principal": of("float"), "annual_rate": of("float", "0.05 is 5 %."), "years": of("integer")},
)
CURRENCY = function(
    "currency_exchange.convert",
    "Converts money.",
    {"base": of("string"), "target": of("string"), "amount": of("float", default=1.0)},
    optional=("amount",),
)
PORTFOLIO = function(
    "portfolio.rebalance",
    "Trades up to the wanted weights.",
    {
        "positions": of(
            "array",
            items=of(
                "dict",
                properties={
                    "ticker": of("string"),
                    "weight": of("float"),
                    "lots": of("array", items=of("dict", properties={"price": of("float")})),
                },
                required=["ticker", "weight"],
            ),
        ),
        "dry_run": of("bool"),
    },
)
MOLECULE = function(
    "chemistry.molecular_weight",
    "The weight of a molecule.",
    {"compound": of("string", "Such as 'C6H12O6'."), "to_unit": of("string")},
    optional=("to_unit",),
)
DNA = function(
    "biology.dna_complement",
    "The other strand.",
    {"sequence": of("string"), "direction": of("string", enum=["5'→3'", "3'→5'"])},
    optional=("direction",),
)
FORCE = function(
    "physics.electric_force",
    "Coulomb's law.",
    {"q1": of("float"), "q2": of("float"), "distance": of("float")},
)
KINEMATICS = function(
    "kinematics.final_velocity",
    "The velocity at the end.",
    {
        "initial_velocity": of("float", default=0.0),
        "acceleration": of("float", "m/s².", default=-9.81),
        "time": of("float"),
    },
    optional=("initial_velocity", "acceleration"),
)
POPULATION = function(
    "country_info.population", "People in a country.", {"country": of("string", "国, in English.")}
)
DISTANCE = function(
    "route_planner.calculate",
    "The way from here to there.",
    {
        "start": of("string"),
        "end": of("string"),
        "via": of("array", items=of("string")),
        "method": of("string", enum=["fastest", "shortest", "balanced"], default="fastest"),
        "avoid": of("dict", properties={"tolls": of("bool"), "ferries": of("bool")}),
    },
    optional=("via", "method", "avoid"),
)
PLAYER = function(
    "sports.player_stats",
    "Statistics of a player.",
    {"player_name": of("string"), "season": of("string"), "team": of("string", default="")},
    optional=("season", "team"),
)
MUSIC = function(
    "spotify.play",
    "Plays a song.",
    {"artist": of("string"), "duration": of("integer", "Minutes."), "shuffle": of("bool")},
    optional=("shuffle",),
)
RECIPE = function(
    "recipe_finder.find",
    "Recipes for what is there.",
    {
        "ingredients": of(
            "array",
            items=of(
                "dict",
                properties={"name": of("string"), "grams": of("float")},
                required=["name"],
            ),
        ),
        "servings": of("integer", default=2),
        "diet": of("string"),
    },
    optional=("servings", "diet"),
)
LAW = function(
    "lawsuit.find_case",
    "A case by its number.",
    {"docket_number": of("string"), "court": of("string"), "full_text": of("bool", default=False)},
    optional=("full_text",),
)
UBER = function(
    "uber.ride",
    "Orders a ride.",
    {
        "loc": of("string", "An address."),
        "type": of("string", enum=["plus", "comfort", "black"]),
        "time": of("integer", "Minutes to wait."),
    },
)
LIGHTS = function(
    "smart_home.set_lights",
    "Sets lamps.",
    {
        "room": of("string"),
        "color": of("tuple", "Red, green and blue.", items=of("integer", minimum=0, maximum=255)),
        "level": of("integer", enum=[0, 25, 50, 75, 100]),
    },
    optional=("color",),
)
TIMER = function("start_timer", "Starts a timer.", {"seconds": of("integer")})
CLOCK = function("now", "What time it is.", {})
REMINDERS = function(
    "todo.add",
    "Adds to the list.",
    {
        "content": of("string"),
        "type": of("string", enum=["add", "delete", "complete"]),
        "tags": of("array", items=of("string")),
    },
    optional=("tags",),
)
TRANSLATE = function(
    "translate_text",
    "Translates.",
    {"text": of("string"), "source": of("string"), "target": of("string")},
    optional=("source",),
)
TREE = function(
    "decision_tree.fit",
    "Fits a tree.",
    {
        "data": of(
            "dict",
            properties={
                "rows": of("array", items=of("dict", properties={"x": of("float")})),
                "labels": of("array", items=of("integer")),
                "meta": of(
                    "dict",
                    properties={"origin": of("dict", properties={"url": of("string")})},
                ),
            },
            required=["rows", "labels"],
        ),
        "max_depth": of("integer", default=3),
        "criterion": of("string", enum=["gini", "entropy", "log_loss"]),
    },
    optional=("max_depth", "criterion"),
)
USER = function(
    "user.update",
    "Changes a user.",
    {
        "user_id": of("integer"),
        "special": of("string", default="black"),
        "address": of(
            "dict",
            properties={
                "street": of("string"),
                "geo": of("dict", properties={"lat": of("float"), "lon": of("float")}),
            },
            required=["street"],
        ),
    },
    optional=("special", "address"),
)

Request = tuple[list[Schema], list[Called]]
SIMPLE: dict[str, Request] = {
    "factorial": ([FACTORIAL], [("math.factorial", {"number": 5})]),
    "integral": (
        [INTEGRAL],
        [
            (
                "calculus.integrate",
                {"function": "lambda x: x**2 if x < 3 else {1}", "interval": [0.0, 4.5]},
            )
        ],
    ),
    "matrices": (
        [MATRIX],
        [("numpy.linalg.matmul", {"left": [[1.0, 2.0], []], "right": [[-0.5]]})],
    ),
    "flights": (
        [FLIGHTS],
        [
            (
                "flights.search",
                {
                    "from": "ZRH",
                    "to": "HND",
                    "date": "2026-02-28",
                    "passengers": [
                        {"kind": "adult"},
                        {"kind": "child", "age": 7, "seat": {"row": 12, "letter": "A"}},
                    ],
                },
            )
        ],
    ),
    "hotel": (
        [HOTEL],
        [
            (
                "hotel.book",
                {
                    "hotel_id": "0007",
                    "stay": {
                        "check_in": "2026-05-01",
                        "nights": 2,
                        "guests": [{"name": "Zoë, the 1st", "is_child": False}],
                    },
                    "wishes": ["Blick aufs Meer", 'a "quiet" room'],
                },
            )
        ],
    ),
    "mail": (
        [MAIL],
        [
            (
                "send_email",
                {
                    "to": ["a@example.com"],
                    "subject": "Re: [draft] {x: 1}",
                    "body": "Hi,\n\n  it's 5 > 3 & \\n stays.\nBye",
                    "attachments": [{"name": "ü.pdf", "bytes": 10}],
                },
            )
        ],
    ),
    "statement": (
        [SQL],
        [
            (
                "sql.execute",
                {
                    "sql_keyword": "INSERT",
                    "table_name": "people",
                    "columns": ["id", "name"],
                    "insert_values": [["1", "O'Neil"], ["2", "null"]],
                },
            )
        ],
    ),
    "code": ([PYTHON], [("run_python", {"code": 'def f(x):\n    return f"{x}\\t" + "]"'})]),
    "portfolio": (
        [PORTFOLIO],
        [
            (
                "portfolio.rebalance",
                {
                    "positions": [
                        {"ticker": "BRK.B", "weight": 0.6, "lots": [{"price": 410.25}, {}]},
                        {"ticker": "NESN", "weight": 0.4},
                    ],
                    "dry_run": True,
                },
            )
        ],
    ),
    "tree": (
        [TREE],
        [
            (
                "decision_tree.fit",
                {
                    "data": {
                        "rows": [{"x": 1.5}, {}],
                        "labels": [0, 1],
                        "meta": {"origin": {"url": "https://example.com/?a=1,2&b={}"}},
                    },
                    "criterion": "log_loss",
                },
            )
        ],
    ),
    "food": ([ORDER], [("ChaFod", {"TheFod": "PIZZA", "amount": 2, "Extras": {"cheese": 3}})]),
    "clock": ([CLOCK], [("now", {})]),
}
MULTIPLE: dict[str, Request] = {
    "weather": (
        [WEATHER, FORECAST, POPULATION],
        [("weather.forecast", {"coordinates": [47.37, -8.54], "include": {"wind": True}})],
    ),
    "physics": (
        [FORCE, KINEMATICS, MOLECULE, DNA],
        [("biology.dna_complement", {"sequence": "AGGCT", "direction": "5'→3'"})],
    ),
    "food": (
        [RESTAURANTS, RECIPE, REMINDERS],
        [
            (
                "find_restaurants",
                {"near": "Kyōto", "cuisine": "日本料理", "dietary_conditions": ["Vegan", "Halal"]},
            )
        ],
    ),
    "money": (
        [LOAN, CURRENCY, STOCK],
        [
            (
                "finance.loan.monthly_payment",
                {"principal": 1e6, "annual_rate": 0.0525, "years": 30},
            )
        ],
    ),
    "home": (
        [LIGHTS, TIMER, MUSIC, CALENDAR],
        [("smart_home.set_lights", {"room": "Küche", "color": [255, 0, 8], "level": 75})],
    ),
    "law": (
        [LAW, PLAYER, USER],
        [
            (
                "user.update",
                {
                    "user_id": 7890,
                    "address": {"street": "Weg 1", "geo": {"lat": -1.5, "lon": 0.0}},
                },
            )
        ],
    ),
}
PARALLEL: dict[str, Request] = {
    "factorials": ([FACTORIAL], [("math.factorial", {"number": each}) for each in (5, 10, 15)]),
    "songs": (
        [MUSIC],
        [
            ("spotify.play", {"artist": "Taylor Swift", "duration": 20}),
            ("spotify.play", {"artist": "Sigur Rós", "duration": 15, "shuffle": False}),
        ],
    ),
    "translations": (
        [TRANSLATE],
        [
            ("translate_text", {"text": "good\nmorning", "target": "ja"}),
            ("translate_text", {"text": "おはよう🌞", "source": "ja", "target": "de"}),
        ],
    ),
}
PARALLEL_MULTIPLE: dict[str, Request] = {
    "numbers": (
        [HYPOT, GCD, TRIANGLE, ROOTS, STATISTICS],
        [
            ("math.hypot", {"x": 3.0, "y": 4.0}),
            ("math.gcd", {"a": 12, "b": 18}),
            ("geometry.triangle-area", {"base": 6, "height": 10}),
            ("algebra.quadratic_roots", {"a": 1, "b": -3, "c": 2, "root_type": "all"}),
            ("statistics.describe", {"values": [1, 2, 3], "which": ["mean"], "is_sample": True}),
        ],
    ),
    "trip": (
        [UBER, DISTANCE, GIT],
        [
            ("uber.ride", {"loc": "2150 Shattuck Ave, 94704", "type": "plus", "time": 10}),
            (
                "route_planner.calculate",
                {
                    "start": "Köln",
                    "end": "Liège",
                    "via": ["Aachen (D)"],
                    "avoid": {"tolls": True, "ferries": False},
                },
            ),
            ("git_commit", {"message": 'Fix "it"', "paths": ["a/b.py"]}),
        ],
    ),
}
REQUESTS: dict[str, Request] = {
    f"{kind} {name}": request
    for kind, requests in (
        ("simple", SIMPLE),
        ("multiple", MULTIPLE),
        ("parallel", PARALLEL),
        ("parallel multiple", PARALLEL_MULTIPLE),
    )
    for name, request in requests.items()
}
