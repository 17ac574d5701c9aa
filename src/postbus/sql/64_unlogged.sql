-- Unlogged queues keep their messages in a table of their own. What works on it is generated from what works on the logged
-- one, so that there is one engine to read: the same functions with another table, named _x_unlogged.

do $$
declare
  v_names text[] := array['_delete_messages', '_sizes', '_check_room', '_insert_messages', '_buried', '_bury', '_lay_out', '_first_due', '_claim_range',
    '_receive_levels', '_next_due', '_locked', '_ack_work', '_free_places', '_nack_work', '_release_work', '_extend_work',
    '_cancel', '_peek', '_archive', '_bury_expired'];
  v_name text;
  v_other text;
  v_sql text;
begin
  foreach v_name in array v_names loop
    v_sql := pg_get_functiondef((select p.oid from pg_proc p where p.pronamespace = 'postbus'::regnamespace and p.proname = v_name));
    v_sql := regexp_replace(v_sql, '\mpostbus\.queued(_\w+)?\M', 'postbus.queued_unlogged\1', 'g');
    foreach v_other in array v_names loop
      v_sql := regexp_replace(v_sql, format('\mpostbus\.%s\M', v_other), format('postbus.%s_unlogged', v_other), 'g');
    end loop;
    execute v_sql;
  end loop;
end
$$;
