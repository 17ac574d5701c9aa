-- Who may do what. PUBLIC gets nothing. Three roles: postbus_reader looks, postbus_writer publishes and consumes,
-- postbus_admin does everything. They are made where the installing user may create roles; otherwise the owner of the
-- schema works as before and grants by hand.

revoke execute on all functions in schema postbus from public;

do $$
declare
  v_role text;
  v_look text[] := array['version', 'now_', 'list_streams', 'list_groups', 'list_captures', 'in_flight', 'dead_letters',
    'list_queues', 'list_key_policies', 'list_bindings', 'list_schedules', 'peek', 'archived', 'next_due', 'default_lease',
    'position', 'hold_position', 'release_positions', 'plan_window', 'read_window', 'read_columns', 'bound_window', 'count_window',
    'queue_stats', 'stream_stats', 'group_stats', 'stuck_groups', 'health', 'metrics', 'throughput', 'latency_percentiles', 'error_rate',
    'list_runs', 'pipeline_stats'];
  v_work text[] := array['publish', '_publish', '_publish_other', 'publish_batch', '_publish_batch', 'consume', 'ack', 'nack', 'extend', 'dead_letter', 'release', 'tick', 'follow_group', 'stage', 'commit_staged', 'discard_staged',
    'begin_run', 'report_run', 'end_run', '_give_back', 'send', '_send', 'send_batch', '_send_other', 'send_topic', '_send_topic', 'receive', 'pop', 'cancel'];
  v_function regprocedure;
begin
  foreach v_role in array array['postbus_reader', 'postbus_writer', 'postbus_admin'] loop
    begin
      if to_regrole(v_role) is null then
        execute format('create role %I nologin', v_role);
      end if;
      execute format('grant usage on schema postbus to %I', v_role);
      for v_function in
        select p.oid::regprocedure from pg_proc p
        where p.pronamespace = 'postbus'::regnamespace and (
          p.proname = any (v_look)
          or v_role <> 'postbus_reader' and p.proname = any (v_work)
          or v_role = 'postbus_admin' and p.proname !~ '^_')
      loop
        execute format('grant execute on function %s to %I', v_function, v_role);
      end loop;
    exception
      when insufficient_privilege or duplicate_object or unique_violation then
        raise notice 'postbus: no role % (%)', v_role, sqlerrm;
    end;
  end loop;
end
$$;
