-- Functions of earlier versions whose parameters or results have changed since.

do $$
begin
  drop function if exists postbus.nack(text[], interval, text);
  drop function if exists postbus.nack(text, interval, text);
  drop function if exists postbus.extend(text[], interval);
  drop function if exists postbus.extend(text, interval);
  drop function if exists postbus._publish(text, text, bytea, text, text, jsonb, timestamptz, text);
  drop function if exists postbus._dedupe(postbus.stream, text);
  drop function if exists postbus._fold_wakes(int, bigint, int, int, timestamptz);
  drop function if exists postbus._new_keys(int, text[]);
  drop function if exists postbus._limits(postbus.queue, text, timestamptz);
  drop function if exists postbus._places(postbus.queue, text);
  drop function if exists postbus._receive_keyed(postbus.queue, int, timestamptz, text, text, timestamptz);
  drop function if exists postbus._scan_is_short(int);
  drop function if exists postbus._receive_keys(postbus.queue, int, timestamptz, text, text, timestamptz);
  if to_regprocedure('postbus._capture_context(int, oid)') is not null and not exists (
      select from pg_proc p where p.oid = to_regprocedure('postbus._capture_context(int, oid)') and 'route_after' = any (p.proargnames)) then
    drop function postbus._capture_context(int, oid);
  end if;
end
$$;
