"""Whatever a column may hold is read, put back exactly, and told from what is not the same."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import pytest
from sqlalchemy import Engine, text

from retrychaos.model.errors import WorldError
from retrychaos.model.ledger import Cell
from tests.postgres.stage import resource_on

TYPES = """
CREATE TYPE mood AS ENUM ('sad', 'it''s ok', 'happy');
CREATE TYPE pair AS (a integer, b text);
CREATE DOMAIN positive AS integer CHECK (value > 0);
CREATE DOMAIN tags AS text[];
CREATE SCHEMA "Other one";
"""
COLUMNS: dict[str, tuple[str, str]] = {
    "small": ("smallint", "'-32768'"),
    "big": ("bigint", "9223372036854775807"),
    "amount": ("numeric(12,2)", "12.50"),
    "exact": ("numeric", "1e-30"),
    "whole": ("numeric", "123456789012345678901234567890"),
    "nan": ("numeric", "'NaN'"),
    "real": ("real", "0.1"),
    "double": ("double precision", "0.1::float8 + 0.2::float8"),
    "infinite": ("double precision", "'-Infinity'"),
    "yes": ("boolean", "true"),
    "text": ("text", r"E'it''s\n\\ \"quoted\" %s {x} ü 🙂'"),
    "empty": ("text", "''"),
    "null": ("text", "NULL"),
    "padded": ("char(5)", "'ab'"),
    "letter": ('"char"', "'x'"),
    "raw": ("bytea", r"'\x00ff5c27'"),
    "json": ("json", """'{"b": 1, "a": [1.50, null, "ü"]}'"""),
    "jsonb": ("jsonb", """'{"b": 1, "a": [1.50, null, "ü"]}'"""),
    "ints": ("integer[]", "'{{1,2},{3,NULL}}'"),
    "bounds": ("integer[]", "'[0:1]={7,8}'"),
    "texts": ("text[]", r"ARRAY['a', 'NULL', NULL, '', '{x,y}', 'q\"b\\', ' ']"),
    "flags": ("boolean[]", "'{t,f}'"),
    "blobs": ("bytea[]", r"ARRAY['\x00ff'::bytea]"),
    "none": ("integer[]", "'{}'"),
    "boxes": ("box[]", "'{(1,1),(0,0);(2,2),(1,1)}'"),
    "uuid": ("uuid", "'f81d4fae-7dec-11d0-a765-00a0c91e6bf6'"),
    "moment": ("timestamptz", "'2024-02-29 23:59:59.123456+05:30'"),
    "ever": ("timestamptz", "'infinity'"),
    "long_ago": ("timestamptz", "'0044-03-15 00:00:00+00 BC'"),
    "local": ("timestamp", "'2024-02-29 23:59:59.1'"),
    "day": ("date", "'2024-02-29'"),
    "hour": ("time", "'24:00:00'"),
    "zoned": ("timetz", "'12:00:00-03'"),
    "span": ("interval", "'1 year -2 days 00:00:01.5'"),
    "address": ("inet", "'10.0.0.1'"),
    "net": ("cidr", "'10.0.0.0/8'"),
    "mac": ("macaddr", "'08:00:2b:01:02:03'"),
    "bits": ("varbit", "B'1010'"),
    "range": ("int4range", "'[1,10)'"),
    "period": ("tstzrange", "'[2024-01-01 00:00+00,)'"),
    "many": ("int4multirange", "'{[1,3),[5,7)}'"),
    "mood": ("mood", "'it''s ok'"),
    "moods": ("mood[]", "'{sad,happy}'"),
    "pair": ("pair", "ROW(1, 'a,\"b')"),
    "pairs": ("pair[]", "ARRAY[ROW(1, 'a,b')::pair, ROW(NULL, NULL)::pair]"),
    "void_pair": ("pair", "ROW(NULL, NULL)"),
    "positive": ("positive", "7"),
    "tags": ("tags", "'{x,y}'"),
    "point": ("point", "'(1.5,2)'"),
    "money": ("money", "'12.34'"),
    "xml": ("xml", "'<a>1</a>'"),
    "vector": ("tsvector", "to_tsvector('simple', 'a fat cat')"),
    "query": ("tsquery", "'fat & !rat'"),
    "class": ("regclass", "'pg_class'"),
    "lsn": ("pg_lsn", "'16/B374D848'"),
    "path": ("jsonpath", "'$.a[*]'"),
}


@pytest.fixture
def zoo(engine: Engine) -> Engine:
    columns = ", ".join(f'"{name}" {kind}' for name, (kind, _) in COLUMNS.items())
    values = ", ".join(f"({value})::{kind}" for kind, value in COLUMNS.values())
    run(engine, TYPES, f"CREATE TABLE zoo ({columns})", f"INSERT INTO zoo VALUES ({values})")
    return engine


def run(engine: Engine, *statements: str) -> None:
    with engine.begin() as connection:
        raw: Any = connection.connection.dbapi_connection
        for statement in statements:
            raw.cursor().execute(statement)


def whole(engine: Engine, table: str) -> Counter[str]:
    with engine.connect() as connection:
        return Counter(connection.execute(text(f"SELECT t::text FROM ONLY {table} t")).scalars())


def test_every_type_is_put_back_as_it_was(zoo: Engine) -> None:
    before = whole(zoo, "zoo")
    with resource_on(zoo) as database:
        start, blob = database.version, pickle.loads(pickle.dumps(database.save()))
        run(zoo, "DELETE FROM zoo", "INSERT INTO zoo DEFAULT VALUES")
        assert database.sweep() is not start
        database.restore(start, blob)
        assert whole(zoo, "zoo") == before
        assert database.sweep() is start


def test_a_change_of_any_type_is_seen(zoo: Engine) -> None:
    with resource_on(zoo) as database:
        start, blob = database.version, database.save()
        for column in COLUMNS.keys() - {"null"}:
            run(zoo, f'UPDATE zoo SET "{column}" = NULL')
            assert database.sweep() is not start, column
            database.restore(start, blob)
            run(zoo, 'UPDATE zoo SET "text" = "text"')
            assert database.sweep() is start, column


CELLS: dict[str, Cell] = {
    "small": -32768,
    "amount": "12.50",
    "whole": 123456789012345678901234567890,
    "double": 0.1 + 0.2,
    "yes": True,
    "raw": b"\x00\xff\x5c\x27",
    "null": None,
    "empty": "",
    "text": 'it\'s\n\\ "quoted" %s {x} ü 🙂',
    "ints": ((1, 2), (3, None)),
    "bounds": "[0:1]={7,8}",
    "texts": ("a", "NULL", None, "", "{x,y}", 'q\\"b\\\\', " "),
    "flags": (True, False),
    "blobs": (b"\x00\xff",),
    "none": (),
    "boxes": "{(1,1),(0,0);(2,2),(1,1)}",
    "moods": ("sad", "happy"),
    "tags": ("x", "y"),
    "positive": 7,
    "moment": "2024-02-29 18:29:59.123456+00",
}


def test_values_are_cells_by_which_they_are_compared(zoo: Engine) -> None:
    with resource_on(zoo) as database:
        relation = database.version.relations["zoo"]
        row = dict(zip(relation.columns, relation.rows[0], strict=True))
        assert {name: row[name] for name in CELLS} == CELLS


TABLES = {
    "identity": ("id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, n int", "(n) VALUES (1), (2)"),
    "by_default": ("id int GENERATED BY DEFAULT AS IDENTITY, n int", "(n) VALUES (1), (2)"),
    "serial": ("id serial PRIMARY KEY, n int", "(n) VALUES (1), (2)"),
    "computed": ("n int, twice int GENERATED ALWAYS AS (n * 2) STORED, m int", "(n, m) VALUES (1, 5), (2, 6)"),
    "only computed": ("twice int GENERATED ALWAYS AS (7) STORED", "DEFAULT VALUES"),
    "no columns": ("", "DEFAULT VALUES"),
    "unique": ("n int UNIQUE DEFERRABLE INITIALLY DEFERRED, m int", "VALUES (1, 1), (2, 2)"),
    "excluding": ("r int4range, EXCLUDE USING gist (r WITH &&)", "VALUES ('[1,3)'), ('[3,5)')"),
    "unlogged": ("n int", "VALUES (1)"),
    "wide row": ("t text", "VALUES (repeat(md5('x'), 5000))"),
    'q"uoted': ('"we ird" int, "SELECT" text', "VALUES (1, 'a')"),
}


@pytest.mark.parametrize("kind", list(TABLES))
def test_every_kind_of_table_is_put_back(engine: Engine, kind: str) -> None:
    columns, values = TABLES[kind]
    name = '"' + kind.replace('"', '""') + '"'
    run(
        engine,
        f"CREATE {'UNLOGGED' if kind == 'unlogged' else ''} TABLE {name} ({columns})",
        f"INSERT INTO {name} {values}",
    )
    before = whole(engine, name)
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        run(engine, f"DELETE FROM {name}")
        assert database.sweep() is not start
        emptied, empty_blob = database.version, database.save()
        database.restore(start, blob)
        assert whole(engine, name) == before
        run(engine, f"TRUNCATE {name}")
        assert database.sweep() is not start
        database.restore(start, blob)
        assert whole(engine, name) == before
        database.restore(emptied, empty_blob)
        assert whole(engine, name) == Counter()


def test_equal_rows_are_counted(engine: Engine) -> None:
    run(engine, "CREATE TABLE bag (n int)", "INSERT INTO bag VALUES (1), (1), (1), (2)")
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        run(engine, "DELETE FROM bag WHERE ctid = '(0,2)'")
        assert Counter(database.sweep().relations["bag"].rows) == {(1,): 2, (2,): 1}
        fewer, fewer_blob = database.version, database.save()
        database.restore(start, blob)
        assert whole(engine, "bag") == {"(1)": 3, "(2)": 1}
        database.restore(fewer, fewer_blob)
        assert whole(engine, "bag") == {"(1)": 2, "(2)": 1}


def test_schemas_partitions_and_heirs(engine: Engine) -> None:
    run(
        engine,
        'CREATE SCHEMA app; CREATE SCHEMA "pg other"; CREATE TABLE app.things (n int)',
        "INSERT INTO app.things VALUES (1)",
        'CREATE TABLE "pg other".things (n int); INSERT INTO "pg other".things VALUES (2)',
        "CREATE TABLE events (id bigint GENERATED ALWAYS AS IDENTITY, day date, n int) PARTITION BY RANGE (day)",
        "CREATE TABLE events_24 PARTITION OF events FOR VALUES FROM ('2024-01-01') TO ('2025-01-01')",
        "CREATE TABLE events_25 (n int, day date NOT NULL, id bigint NOT NULL)",  # columns in another order
        "ALTER TABLE events ATTACH PARTITION events_25 FOR VALUES FROM ('2025-01-01') TO ('2026-01-01')",
        "INSERT INTO events (day, n) VALUES ('2024-05-05', 1), ('2025-05-05', 2)",
        "CREATE TABLE parent (n int); CREATE TABLE heir (m int) INHERITS (parent)",
        "INSERT INTO parent VALUES (1); INSERT INTO heir VALUES (2, 3)",
    )
    with resource_on(engine) as database:
        relations = database.version.relations
        assert set(relations) == {"app.things", "pg other.things", "events", "parent", "heir"}
        assert Counter(relations["events"].rows) == {(1, "2024-05-05", 1): 1, (2, "2025-05-05", 2): 1}
        assert relations["parent"].rows == ((1,),)
        start, blob = database.version, database.save()
        run(
            engine,
            "UPDATE events SET day = day + 365 WHERE id = 1; UPDATE parent SET n = n + 10; DELETE FROM app.things",
        )
        after = database.sweep().relations
        assert Counter(after["events"].rows) == {(1, "2025-05-05", 1): 1, (2, "2025-05-05", 2): 1}
        assert after["heir"].rows == ((12, 3),) and after["app.things"].rows == ()
        assert after["pg other.things"] is relations["pg other.things"]
        database.restore(start, blob)
        assert whole(engine, "events_24") == {"(1,2024-05-05,1)": 1}
        assert whole(engine, "events_25") == {"(2,2025-05-05,2)": 1}
        assert whole(engine, "parent") == {"(1)": 1} and whole(engine, "heir") == {"(2,3)": 1}


def test_sequences_are_put_back(engine: Engine) -> None:
    run(
        engine,
        "CREATE TABLE t (id serial, n int); CREATE SEQUENCE free START 7 INCREMENT -3 MINVALUE -99999 MAXVALUE 7",
    )

    def stand() -> list[tuple[Any, ...]]:
        with engine.connect() as connection:
            return [
                tuple(connection.execute(text(f"SELECT last_value, is_called FROM {name}")).one())
                for name in ("free", "t_id_seq")
            ]

    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        fresh = stand()
        run(engine, "SELECT nextval('free'); SELECT nextval('free'); INSERT INTO t (n) VALUES (1)")
        used = stand()
        assert used == [(4, True), (1, True)]
        database.sweep()
        then, then_blob = database.version, database.save()
        database.restore(start, blob)
        assert stand() == fresh == [(7, False), (1, False)]
        database.restore(then, then_blob)
        assert stand() == used
        run(engine, "SELECT setval('free', -50); TRUNCATE t RESTART IDENTITY")
        database.sweep()
        database.restore(then, then_blob)
        assert stand() == used


def test_only_drawn_ids_are_names(engine: Engine) -> None:
    run(engine, "CREATE TABLE t (id serial PRIMARY KEY, n int); INSERT INTO t (n) VALUES (1)")
    with resource_on(engine) as database:
        assert database.version.relations["t"].generated == {}
        run(engine, "INSERT INTO t (n) VALUES (2); INSERT INTO t (id, n) VALUES (100, 3)")
        database.sweep()
        assert database.version.relations["t"].generated == {0: frozenset({2})}
        start, blob = database.version, database.save()
        run(engine, "INSERT INTO t (n) VALUES (4); DELETE FROM t WHERE n = 1")
        database.sweep()
        assert database.version.relations["t"].generated == {0: frozenset({2, 3})}
        database.restore(start, blob)
        assert database.version is start
        database.shift_ids(7919)
        run(engine, "INSERT INTO t (n) VALUES (4)")
        database.sweep()
        assert database.version.relations["t"].generated == {0: frozenset({2, 2 + 7919 + 1})}


def test_keys_and_references(engine: Engine) -> None:
    run(
        engine,
        "CREATE TABLE a (id serial PRIMARY KEY); CREATE SCHEMA s",
        "CREATE TABLE s.b (x int, y int, a int REFERENCES a, "
        "PRIMARY KEY (y, x)); CREATE TABLE c (dropped int, b int, FOREIGN KEY (b) REFERENCES a)",
        "ALTER TABLE c DROP dropped",
    )
    with resource_on(engine) as database:
        relations = database.version.relations
        assert relations["a"].keys == (0,) and relations["s.b"].keys == (1, 0)
        assert relations["s.b"].refs == {2: "a"} and relations["c"].refs == {0: "a"}


def test_foreign_keys_and_triggers_do_not_stand_in_the_way(engine: Engine) -> None:
    run(
        engine,
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (a int NOT NULL REFERENCES a)",
        "CREATE TABLE noted (what text); CREATE FUNCTION note() RETURNS trigger AS "
        "'BEGIN INSERT INTO noted VALUES (TG_OP); RETURN NULL; END' LANGUAGE plpgsql",
        "CREATE TRIGGER note AFTER INSERT OR DELETE ON a FOR EACH ROW EXECUTE FUNCTION note()",
        "INSERT INTO a VALUES (1), (2); INSERT INTO b VALUES (1); DELETE FROM noted",
    )
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        run(engine, "DELETE FROM b; DELETE FROM a")
        database.sweep()
        database.restore(start, blob)
        assert whole(engine, "a") == {"(1)": 1, "(2)": 1} and whole(engine, "b") == {"(1)": 1}
        assert whole(engine, "noted") == Counter()


def test_a_materialized_view_is_refreshed_into_its_state(engine: Engine) -> None:
    run(engine, "CREATE TABLE t (n int); CREATE MATERIALIZED VIEW v AS SELECT sum(n) AS total FROM t")
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        run(engine, "INSERT INTO t VALUES (1); REFRESH MATERIALIZED VIEW v")
        assert database.sweep().relations["v"].rows == ((1,),)
        then, then_blob = database.version, database.save()
        database.restore(start, blob)
        assert whole(engine, "v") == {"()": 1}
        database.restore(then, then_blob)
        assert whole(engine, "v") == {"(1)": 1}


def test_a_materialized_view_that_is_behind_cannot_be_put_back(engine: Engine) -> None:
    run(engine, "CREATE TABLE t (n int); CREATE MATERIALIZED VIEW v AS SELECT sum(n) FROM t; INSERT INTO t VALUES (1)")
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        run(engine, "REFRESH MATERIALIZED VIEW v")
        database.sweep()
        with pytest.raises(WorldError, match=r"materialized view v .*Refresh it before the check"):
            database.restore(start, blob)


def test_a_cast_to_text_of_the_users_leaves_nothing_out(engine: Engine) -> None:
    run(
        engine,
        "CREATE TYPE pair AS (a int, b int); CREATE TABLE t (p pair)",
        "CREATE FUNCTION brief(pair) RETURNS text AS 'SELECT $1.a::text' LANGUAGE sql IMMUTABLE",
        "CREATE CAST (pair AS text) WITH FUNCTION brief(pair)",
        "INSERT INTO t VALUES (ROW(1, 2))",
    )
    with resource_on(engine) as database:
        assert database.version.relations["t"].rows == (("(1,2)",),)


def test_a_trigger_that_always_fires_is_refused(engine: Engine) -> None:
    run(
        engine,
        "CREATE TABLE t (n int); CREATE FUNCTION f() RETURNS trigger AS 'BEGIN RETURN NEW; END' LANGUAGE plpgsql",
        "CREATE TRIGGER stubborn BEFORE INSERT ON t FOR EACH ROW EXECUTE FUNCTION f()",
        "ALTER TABLE t ENABLE ALWAYS TRIGGER stubborn",
    )
    with pytest.raises(WorldError, match=r"stubborn on t fires always .*Remedy"), resource_on(engine):
        pass


def test_a_table_that_somebody_has_locked_does_not_hang_the_check(engine: Engine) -> None:
    run(engine, "CREATE TABLE t (n int); INSERT INTO t VALUES (1); CREATE TABLE u (n int)")
    with resource_on(engine) as database:
        start, blob = database.version, database.save()
        with engine.connect() as other:
            other.execute(text("TRUNCATE t"))  # not committed
            run(engine, "INSERT INTO u VALUES (1)")
            assert database.sweep().relations["u"].rows == ((1,),)
            assert database.version.relations["t"] is start.relations["t"]
            other.rollback()
        run(engine, "DELETE FROM t")
        database.sweep()
        with engine.connect() as other:
            other.execute(text("LOCK t IN ACCESS EXCLUSIVE MODE"))
            with pytest.raises(WorldError, match=r"cannot be restored .*Close other connections"):
                database.restore(start, blob)
