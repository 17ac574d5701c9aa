-- Cron expressions: the next slot after a moment, in a time zone.
--
-- A slot is a time of the clock on the wall, turned into an instant:
--   * A fixed hour that the clock skips (spring) fires at the end of the gap, once for all that was skipped. One that comes
--     twice (autumn) fires the first time. Both say the same: a slot is when the clock first reaches its time.
--   * With "*" in the hour field a slot is every minute whose time on the wall matches: what is skipped is left out, what
--     comes twice fires twice.
-- Days are found by arithmetic; minutes are walked only around the days on which a zone changes its clock.

-- A cron expression as six bit masks: minute, hour, day, month, weekday (0 is Sunday), and in the sixth bit n is set
-- where field n has a "*".

-- A number or a name of a field; null where it is neither.
create or replace function postbus._cron_value(p_text text, p_names text[], p_least int)
returns int
language sql
immutable
as $$
  select case when p_text ~ '^[0-9]{1,2}$' then p_text::int else p_least - 1 + array_position(p_names, p_text) end
$$;

-- The mask of one field, or null where it is wrong. Ranges may end with Sunday, which is also 7.
create or replace function postbus._cron_field(p_field text, p_least int, p_most int, p_names text[])
returns bigint
language plpgsql
immutable
as $$
declare
  v_week boolean := p_most = 7;
  v_item text;
  v_part text[];
  v_lo int;
  v_hi int;
  v_step int;
  v_mask bigint := 0;
begin
  foreach v_item in array string_to_array(p_field, ',') loop
    v_part := regexp_match(v_item, '^(?:(\*)|([a-z0-9]+)(?:-([a-z0-9]+))?)(?:/([0-9]{1,2}))?$');
    if v_part is null or v_part[4] is not null and v_part[1] is null and v_part[3] is null then
      return null;
    end if;
    v_lo := case when v_part[1] is not null then p_least else postbus._cron_value(v_part[2], p_names, p_least) end;
    v_hi := case when v_part[1] is not null then p_most - v_week::int
      when v_part[3] is not null then postbus._cron_value(v_part[3], p_names, p_least) else v_lo end;
    if v_week and v_hi = 0 and v_lo > 0 then
      v_hi := 7;
    end if;
    v_step := coalesce(v_part[4]::int, 1);
    if (v_lo between p_least and v_hi and v_hi <= p_most and v_step between 1 and p_most - p_least) is not true then
      return null;
    end if;
    for v in v_lo .. v_hi by v_step loop
      v_mask := v_mask | (1::bigint << case when v_week then v % 7 else v end);
    end loop;
  end loop;
  return nullif(v_mask, 0);
end
$$;

create or replace function postbus._cron_masks(p_cron text)
returns bigint[]
language plpgsql
immutable
as $$
declare
  v_kinds text[] := array['minute', 'hour', 'day', 'month', 'weekday'];
  v_least int[] := array[0, 0, 1, 1, 0];
  v_most int[] := array[59, 23, 31, 12, 7];
  v_text text := lower(btrim(p_cron, E' \t\r\n'));
  v_fields text[];
  v_masks bigint[] := array[0, 0, 0, 0, 0, 0];
begin
  v_fields := regexp_split_to_array(case v_text when '@hourly' then '0 * * * *' when '@daily' then '0 0 * * *'
    when '@weekly' then '0 0 * * 0' when '@monthly' then '0 0 1 * *' when '@yearly' then '0 0 1 1 *' else v_text end, '\s+');
  if cardinality(v_fields) is distinct from 5 then
    raise exception using errcode = 'PB003', message = format('cron expression %L does not have five fields', p_cron),
      hint = 'Write minute, hour, day, month and weekday, such as "30 9 * * mon-fri"; or @hourly, @daily, @weekly, @monthly, @yearly.';
  end if;
  for i in 1 .. 5 loop
    v_masks[i] := postbus._cron_field(v_fields[i], v_least[i], v_most[i], case i
      when 4 then array['jan', 'feb', 'mar', 'apr', 'may', 'jun', 'jul', 'aug', 'sep', 'oct', 'nov', 'dec']
      when 5 then array['sun', 'mon', 'tue', 'wed', 'thu', 'fri', 'sat'] end);
    if v_masks[i] is null then
      raise exception using errcode = 'PB003',
        message = format('cron expression %L has a wrong %s: %L', p_cron, v_kinds[i], v_fields[i]),
        hint = format('The %s is "*" or from %s to %s%s; "a-b" is a range that goes up, "*/n" and "a-b/n" are steps, commas make a list.',
          v_kinds[i], v_least[i], v_most[i], case i when 4 then ' (or jan to dec)' when 5 then ' (or sun to sat; 0 and 7 are Sunday)' end);
    end if;
    if strpos(v_fields[i], '*') > 0 then
      v_masks[6] := v_masks[6] | (1 << i);
    end if;
  end loop;
  return v_masks;
end
$$;

-- Where day and weekday are both restricted, either will do; that is how cron has always been.
create or replace function postbus._cron_is_day(p_masks bigint[], p_day date)
returns boolean
language plpgsql
immutable
as $$
declare
  v_day boolean := p_masks[3] >> extract(day from p_day)::int & 1 = 1;
  v_weekday boolean := p_masks[5] >> extract(dow from p_day)::int & 1 = 1;
begin
  return p_masks[4] >> extract(month from p_day)::int & 1 = 1
    and case when p_masks[6] & ((1 << 3) | (1 << 5)) = 0 then v_day or v_weekday else v_day and v_weekday end;
end
$$;

-- The first day from p_from on that matches, or null. 29 February can stay away from a weekday for 40 years.
create or replace function postbus._cron_day(p_masks bigint[], p_from date)
returns date
language plpgsql
immutable
as $$
declare
  v_month date := p_from - (extract(day from p_from)::int - 1);
  v_next date;
begin
  for i in 0 .. 12 * 41 loop
    v_next := v_month + interval '1 month';
    if p_masks[4] >> extract(month from v_month)::int & 1 = 1 then
      for v_day in greatest(p_from - v_month, 0) .. v_next - v_month - 1 loop
        if postbus._cron_is_day(p_masks, v_month + v_day) then
          return v_month + v_day;
        end if;
      end loop;
    end if;
    v_month := v_next;
  end loop;
  return null;
end
$$;

-- The first minute of a day from p_from on that matches, or null.
create or replace function postbus._cron_minute(p_masks bigint[], p_from int)
returns int
language plpgsql
immutable
as $$
begin
  for v_hour in p_from / 60 .. 23 loop
    continue when p_masks[2] >> v_hour & 1 = 0;
    for v_minute in greatest(p_from - v_hour * 60, 0) .. 59 loop
      if p_masks[1] >> v_minute & 1 = 1 then
        return v_hour * 60 + v_minute;
      end if;
    end loop;
  end loop;
  return null;
end
$$;

create or replace function postbus._cron_is_slot(p_masks bigint[], p_wall timestamp)
returns boolean
language plpgsql
immutable
as $$
begin
  return p_masks[1] >> extract(minute from p_wall)::int & 1 = 1 and p_masks[2] >> extract(hour from p_wall)::int & 1 = 1
    and postbus._cron_is_day(p_masks, p_wall::date);
end
$$;

-- The first slot after p_after, up to p_to, found minute by minute: for days on which the clock changes. For a fixed hour
-- it begins a day early, to know how far the clock on the wall has been: only times it has not reached before count.
create or replace function postbus._cron_walk(
  p_masks bigint[],
  p_timezone text,
  p_after timestamptz,
  p_from timestamptz,
  p_to timestamptz
)
returns timestamptz
language plpgsql
stable
as $$
declare
  v_real boolean := p_masks[6] >> 2 & 1 = 1;
  v_at timestamptz := date_trunc('minute', greatest(p_from, case when v_real then p_after else p_after - interval '1 day' end));
  v_reached timestamp := v_at at time zone p_timezone;
  v_wall timestamp;
begin
  while v_at < p_to loop
    v_at := v_at + interval '1 minute';
    v_wall := v_at at time zone p_timezone;
    if v_real then
      v_reached := v_wall - interval '1 minute';
    end if;
    while v_reached < v_wall loop
      v_reached := v_reached + interval '1 minute';
      if v_at > p_after and postbus._cron_is_slot(p_masks, v_reached) then
        return v_at;
      end if;
    end loop;
  end loop;
  return null;
end
$$;

-- The first slot of a day after p_after, or null, where the zone keeps its offset from UTC.
create or replace function postbus._cron_plain(p_masks bigint[], p_offset interval, p_day date, p_after timestamptz)
returns timestamptz
language plpgsql
immutable
as $$
declare
  v_wall timestamp := p_after at time zone 'UTC' + p_offset;
  v_minute int;
begin
  if v_wall::date > p_day then
    return null;
  end if;
  v_minute := postbus._cron_minute(p_masks, case when v_wall::date < p_day then 0
    else extract(hour from v_wall)::int * 60 + floor(extract(minute from v_wall))::int + 1 end);
  return (p_day + make_interval(mins => v_minute) - p_offset) at time zone 'UTC';
end
$$;

create or replace function postbus._zone_offset(p_timezone text, p_at timestamptz)
returns interval
language sql
stable
as $$
  select (p_at at time zone p_timezone) - (p_at at time zone 'UTC')
$$;

-- _cron_next for an expression that is parsed already.
create or replace function postbus._cron_after(p_masks bigint[], p_timezone text, p_after timestamptz)
returns timestamptz
language plpgsql
stable
as $$
declare
  -- A clock that is put back over midnight comes back to the day before.
  v_day date := (p_after at time zone p_timezone)::date - 1;
  v_from timestamptz;
  v_to timestamptz;
  v_offset interval;
  v_slot timestamptz;
begin
  loop
    v_day := postbus._cron_day(p_masks, v_day);
    exit when v_day is null;
    -- Wide enough for the day in every zone.
    v_from := (v_day - interval '1 day') at time zone 'UTC';
    v_to := (v_day + interval '2 days') at time zone 'UTC';
    v_offset := postbus._zone_offset(p_timezone, v_from);
    if v_offset = postbus._zone_offset(p_timezone, v_to) then
      v_slot := postbus._cron_plain(p_masks, v_offset, v_day, p_after);
    else
      v_slot := postbus._cron_walk(p_masks, p_timezone, p_after, v_from, v_to);
    end if;
    exit when v_slot is not null;
    v_day := v_day + 1;
  end loop;
  return v_slot;
end
$$;

-- The first slot strictly after p_after; null where there is none.
create or replace function postbus._cron_next(p_cron text, p_timezone text, p_after timestamptz)
returns timestamptz
language sql
stable
as $$
  select postbus._cron_after(postbus._cron_masks(p_cron), p_timezone, p_after)
$$;
