"""Class names of the data sets that published checkpoints were trained on, chosen by the number of classes.

Sources: the category lists of COCO 2017 (cocodataset.org), Objects365 v2 (objects365.org) and LVIS v1
(lvisdataset.org), spelt as there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import SourceError, SpecError
from .lvis_names import LVIS

_COCO = """
person; bicycle; car; motorcycle; airplane; bus; train; truck; boat; traffic light; fire hydrant; stop sign;
parking meter; bench; bird; cat; dog; horse; sheep; cow; elephant; bear; zebra; giraffe; backpack; umbrella;
handbag; tie; suitcase; frisbee; skis; snowboard; sports ball; kite; baseball bat; baseball glove;
skateboard; surfboard; tennis racket; bottle; wine glass; cup; fork; knife; spoon; bowl; banana; apple;
sandwich; orange; broccoli; carrot; hot dog; pizza; donut; cake; chair; couch; potted plant; bed; dining
table; toilet; tv; laptop; mouse; remote; keyboard; cell phone; microwave; oven; toaster; sink;
refrigerator; book; clock; vase; scissors; teddy bear; hair drier; toothbrush
"""

# Numbers of COCO categories that were announced and never annotated; the published ids leave them out.
_COCO_GAPS = frozenset((12, 26, 29, 30, 45, 66, 68, 69, 71, 83))
_OBJECTS365 = """
Person; Sneakers; Chair; Other Shoes; Hat; Car; Lamp; Glasses; Bottle; Desk; Cup; Street Lights;
Cabinet/shelf; Handbag/Satchel; Bracelet; Plate; Picture/Frame; Helmet; Book; Gloves; Storage box; Boat;
Leather Shoes; Flower; Bench; Potted Plant; Bowl/Basin; Flag; Pillow; Boots; Vase; Microphone; Necklace;
Ring; SUV; Wine Glass; Belt; Moniter/TV; Backpack; Umbrella; Traffic Light; Speaker; Watch; Tie; Trash bin
Can; Slippers; Bicycle; Stool; Barrel/bucket; Van; Couch; Sandals; Bakset; Drum; Pen/Pencil; Bus; Wild Bird;
High Heels; Motorcycle; Guitar; Carpet; Cell Phone; Bread; Camera; Canned; Truck; Traffic cone; Cymbal;
Lifesaver; Towel; Stuffed Toy; Candle; Sailboat; Laptop; Awning; Bed; Faucet; Tent; Horse; Mirror; Power
outlet; Sink; Apple; Air Conditioner; Knife; Hockey Stick; Paddle; Pickup Truck; Fork; Traffic Sign; Ballon;
Tripod; Dog; Spoon; Clock; Pot; Cow; Cake; Dinning Table; Sheep; Hanger; Blackboard/Whiteboard; Napkin;
Other Fish; Orange/Tangerine; Toiletry; Keyboard; Tomato; Lantern; Machinery Vehicle; Fan; Green Vegetables;
Banana; Baseball Glove; Airplane; Mouse; Train; Pumpkin; Soccer; Skiboard; Luggage; Nightstand; Tea pot;
Telephone; Trolley; Head Phone; Sports Car; Stop Sign; Dessert; Scooter; Stroller; Crane; Remote;
Refrigerator; Oven; Lemon; Duck; Baseball Bat; Surveillance Camera; Cat; Jug; Broccoli; Piano; Pizza;
Elephant; Skateboard; Surfboard; Gun; Skating and Skiing shoes; Gas stove; Donut; Bow Tie; Carrot; Toilet;
Kite; Strawberry; Other Balls; Shovel; Pepper; Computer Box; Toilet Paper; Cleaning Products; Chopsticks;
Microwave; Pigeon; Baseball; Cutting/chopping Board; Coffee Table; Side Table; Scissors; Marker; Pie;
Ladder; Snowboard; Cookies; Radiator; Fire Hydrant; Basketball; Zebra; Grape; Giraffe; Potato; Sausage;
Tricycle; Violin; Egg; Fire Extinguisher; Candy; Fire Truck; Billards; Converter; Bathtub; Wheelchair; Golf
Club; Briefcase; Cucumber; Cigar/Cigarette; Paint Brush; Pear; Heavy Truck; Hamburger; Extractor; Extention
Cord; Tong; Tennis Racket; Folder; American Football; earphone; Mask; Kettle; Tennis; Ship; Swing; Coffee
Machine; Slide; Carriage; Onion; Green beans; Projector; Frisbee; Washing Machine/Drying Machine; Chicken;
Printer; Watermelon; Saxophone; Tissue; Toothbrush; Ice cream; Hotair ballon; Cello; French Fries; Scale;
Trophy; Cabbage; Hot dog; Blender; Peach; Rice; Wallet/Purse; Volleyball; Deer; Goose; Tape; Tablet;
Cosmetics; Trumpet; Pineapple; Golf Ball; Ambulance; Parking meter; Mango; Key; Hurdle; Fishing Rod; Medal;
Flute; Brush; Penguin; Megaphone; Corn; Lettuce; Garlic; Swan; Helicopter; Green Onion; Sandwich; Nuts;
Speed Limit Sign; Induction Cooker; Broom; Trombone; Plum; Rickshaw; Goldfish; Kiwi fruit; Router/modem;
Poker Card; Toaster; Shrimp; Sushi; Cheese; Notepaper; Cherry; Pliers; CD; Pasta; Hammer; Cue; Avocado;
Hamimelon; Flask; Mushroon; Screwdriver; Soap; Recorder; Bear; Eggplant; Board Eraser; Coconut; Tape Measur/
Ruler; Pig; Showerhead; Globe; Chips; Steak; Crosswalk Sign; Stapler; Campel; Formula 1; Pomegranate;
Dishwasher; Crab; Hoverboard; Meat ball; Rice Cooker; Tuba; Calculator; Papaya; Antelope; Parrot; Seal;
Buttefly; Dumbbell; Donkey; Lion; Urinal; Dolphin; Electric Drill; Hair Dryer; Egg tart; Jellyfish;
Treadmill; Lighter; Grapefruit; Game board; Mop; Radish; Baozi; Target; French; Spring Rolls; Monkey;
Rabbit; Pencil Case; Yak; Red Cabbage; Binoculars; Asparagus; Barbell; Scallop; Noddles; Comb; Dumpling;
Oyster; Table Teniis paddle; Cosmetics Brush/Eyeliner Pencil; Chainsaw; Eraser; Lobster; Durian; Okra;
Lipstick; Cosmetics Mirror; Curling; Table Tennis
"""


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.replace("\n", " ").split(";")]


def _coco_ids() -> dict[int, str]:
    ids = [number for number in range(1, 91) if number not in _COCO_GAPS]
    return dict(zip(ids, _names(_COCO), strict=True))


def sets() -> dict[int, tuple[str, dict[int, str]]]:
    """Number of columns of a head -> name of the set, and its class names by column."""
    coco, objects = _names(_COCO), _names(_OBJECTS365)
    return {
        80: ("COCO", dict(enumerate(coco))),
        91: ("COCO by published ids", _coco_ids()),
        365: ("Objects365", dict(enumerate(objects))),
        366: ("Objects365 by published ids", dict(enumerate(objects, 1))),
        1203: ("LVIS", dict(enumerate(_names(LVIS)))),
    }


def labels_for(classes: int) -> dict[int, str] | None:
    """Class names for a head with so many columns; None where no set has that many."""
    found = sets().get(classes)
    return found[1] if found else None


def choose(
    classes: int,
    *,
    file: Path | str | None = None,
    stored: Mapping[int, str] | Sequence[str] = (),
    ref: str = "",
) -> tuple[dict[int, str], str]:
    """Class names by column of a head, and a word on where they are from: a file, the checkpoint, or a known set.

    classes: columns of the head. stored: names in the checkpoint, by id or in order; those of a head with
    one column more start at id 1.

    Raises:
        SourceError: no names and no set of that many classes. SpecError: a file that does not fit the head.
    """

    if file:
        return read_labels(file, classes), f"class names of '{file}'"
    if stored:
        first = 1 if len(stored) == classes - 1 else 0
        names = dict(stored) if isinstance(stored, Mapping) else dict(enumerate(stored, first))
        if max(names) < classes and (isinstance(stored, Mapping) or len(names) >= classes - 1):
            return names, f"{len(names)} class names of the checkpoint"
    unfit = f"; {len(stored)} names in the checkpoint do not fit and were not used" if stored else ""
    found = sets().get(classes)
    if found is not None:
        return found[1], f"class names of {found[0]}, by their number{unfit}"
    known = ", ".join(f"{count} ({name})" for count, (name, _) in sets().items())
    raise SourceError(
        f"'{ref}' has {classes} classes and names none, and no label set has so many; known: {known}{unfit}. "
        "Give the names with --labels FILE, one a line"
    )


def read_labels(path: Path | str, classes: int) -> dict[int, str]:
    """Class names from a text file (one a line) or a JSON object of id to name.

    Raises:
        SpecError: unreadable, empty, or not as many names as the head has classes.
    """
    path = Path(path)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SpecError(f"labels file '{path}' cannot be read: {error}") from None
    if path.suffix == ".json":
        try:
            data = json.loads(text)
            if not isinstance(data, (dict, list)):
                raise ValueError(f"got {type(data).__name__}")
            names = {int(k): str(v) for k, v in data.items()} if isinstance(data, dict) else dict(enumerate(map(str, data)))
        except (ValueError, TypeError) as error:
            raise SpecError(f"labels file '{path}' must be a JSON list or an object of id to name: {error}") from None
    else:
        names = dict(enumerate(line.strip() for line in text.splitlines() if line.strip()))
    if not names or max(names) >= classes or min(names) < 0 or (path.suffix != ".json" and len(names) != classes):
        raise SpecError(
            f"labels file '{path}' has {len(names)} names (ids up to {max(names, default=-1)}), but the head has "
            f"{classes} classes (ids 0..{classes - 1}); give the labels that this checkpoint was trained with"
        )
    return names
