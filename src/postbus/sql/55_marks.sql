-- Low-water marks. While an old snapshot keeps the index entries of finished messages alive, a claim would walk all of
-- them. A mark says where to begin instead. It is a hint: what committed late or came back behind it is found when the
-- whole range is read again, every second, or 20 times as long as that takes (docs/adr/0010-marks.md). Marks are in use
-- only after a claim has walked too far for nothing; without an old snapshot that does not happen, and nothing is late.

-- Where to begin; -infinity: read it all, this time.
create or replace function postbus._mark(p_q postbus.queue, p_level int, p_now timestamptz)
returns timestamptz
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
set enable_seqscan = off
set enable_bitmapscan = off
as $$
declare
  v_m postbus.mark;
begin
  select k.* into v_m from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint
  order by k.queue_id desc, k.level desc, k.n desc limit 1;
  -- One session at a time reads the whole range.
  if v_m.n is null or v_m.scan_at <= p_now and pg_try_advisory_xact_lock(1886351994, p_q.id) then
    return '-infinity';
  end if;
  return v_m.due;
end
$$;

-- After a range was read from p_from: remembers where what matters begins. A whole read that was short ends the use of
-- marks.
create or replace function postbus._set_mark(p_q postbus.queue, p_level int, p_first timestamptz, p_from timestamptz, p_walked bigint, p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_scan timestamptz := p_now + interval '1 second';
begin
  if p_from = '-infinity' and p_walked <= 2000 then
    -- Other priorities may still need theirs; they set the bit again.
    delete from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint;
    if not exists (select from postbus.mark k where k.queue_id = p_q.id) then
      perform postbus._set_bits(p_q.register, 0, 1024);
    end if;
    return;
  end if;
  if p_from > '-infinity' then
    select k.scan_at into v_scan from postbus.mark k where k.queue_id = p_q.id and k.level = p_level::smallint
    order by k.queue_id desc, k.level desc, k.n desc limit 1;
  else
    -- About a microsecond an entry.
    v_scan := p_now + greatest(interval '1 second', p_walked * 20 * interval '1 microsecond');
    perform postbus._set_bits(p_q.register, 1024, 0);
  end if;
  insert into postbus.mark (queue_id, level, n, due, scan_at)
  values (p_q.id, p_level, nextval('postbus.mark_n'), p_first - interval '100 ms', v_scan);
end
$$;

-- A claim took long. Was it the walk?
create or replace function postbus._note_walk(p_queue int, p_now timestamptz)
returns void
language plpgsql
security definer
set search_path = pg_catalog, pg_temp
as $$
declare
  v_probe record := postbus._first_due(p_queue, 0, '-infinity', p_now);
begin
  -- What others are just claiming is not long dead; thousands of entries are.
  if v_probe.walked > 5000 then
    perform postbus._set_mark(q.*, 0, coalesce(v_probe.first, p_now), '-infinity', v_probe.walked, p_now)
    from postbus.queue q where q.id = p_queue;
  end if;
end
$$;
