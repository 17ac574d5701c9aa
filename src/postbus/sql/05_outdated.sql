-- Functions of earlier versions whose parameters or results have changed since.

do $$
begin
  drop function if exists postbus.nack(text[], interval, text);
  drop function if exists postbus.nack(text, interval, text);
  drop function if exists postbus.extend(text[], interval);
  drop function if exists postbus.extend(text, interval);
  drop function if exists postbus._publish(text, text, bytea, text, text, jsonb, timestamptz, text);
  drop function if exists postbus._dedupe(postbus.stream, text);
  if to_regprocedure('postbus._capture_context(int, oid)') is not null and not exists (
      select from pg_proc p where p.oid = to_regprocedure('postbus._capture_context(int, oid)') and 'route_after' = any (p.proargnames)) then
    drop function postbus._capture_context(int, oid);
  end if;
end
$$;
