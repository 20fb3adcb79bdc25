# needs: sqlite3
# A database with fcntl locks, two journals, two processes.
sqlite3 a.db "pragma journal_mode=delete; create table t(id integer primary key, x text, y real);
with recursive c(n) as (select 1 union all select n + 1 from c where n < 20000) insert into t select n, 'row ' || n, n * 0.5 from c;
create index tx on t(x); update t set y = y + 1 where id % 7 = 0; delete from t where id % 11 = 0; vacuum;
select count(*), sum(y), max(x) from t; pragma integrity_check;"
sqlite3 a.db "pragma journal_mode=wal; begin immediate; insert into t(x) values('wal'); commit; select count(*) from t;"
sqlite3 a.db "begin immediate; insert into t(x) values('lost'); select count(*) from t;" ".shell sqlite3 a.db 'insert into t(x) values(1)' 2>&1" "rollback;"
sqlite3 a.db "pragma wal_checkpoint(truncate); select count(*), total(y) from t where x > 'row 5';"
sqlite3 -readonly a.db .dump | cksum
