-- Removes the engine and everything in it, triggers on captured tables included.
create or replace function postbus.uninstall()
returns void
language plpgsql
set search_path = pg_catalog, pg_temp
as $$
begin
  drop schema postbus cascade;
end
$$;
revoke execute on function postbus.uninstall() from public;
