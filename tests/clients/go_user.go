// A user of the generated Go client: argv has mpsd's socket. It prints its results, line by line.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"strings"

	"mpsdclient"
)

func must[T any](value T, answer *http.Response, err error) T {
	if err != nil {
		fmt.Fprintln(os.Stderr, "failed:", err, answer)
		os.Exit(1)
	}
	return value
}

func main() {
	ctx := context.Background()
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", os.Args[1])
	}
	configuration := mpsdclient.NewConfiguration()
	configuration.HTTPClient = &http.Client{Transport: &http.Transport{DialContext: dial}}
	api := mpsdclient.NewAPIClient(configuration)

	status, answer, err := api.NodeAPI.GetStatus(ctx).Execute()
	fmt.Println("healthy", must(status, answer, err).Healthy)
	gpus, answer, err := api.NodeAPI.ListGpus(ctx).Execute()
	total := int64(0)
	for _, gpu := range must(gpus, answer, err).Gpus {
		total += gpu.GetMemoryTotal()
	}
	fmt.Println("total", total)

	size := "8GiB"
	memory := mpsdclient.LeaseOfThreadsMemory{String: &size}
	threads := mpsdclient.NewLeaseOfThreads(25, memory)
	threads.SetName("by threads")
	bytes := int64(6 << 30)
	inBytes := mpsdclient.NewLeaseOfThreads(5.5, mpsdclient.LeaseOfThreadsMemory{Int64: &bytes})
	fraction := mpsdclient.NewLeaseOfFraction(0.25)
	fraction.SetLabels(map[string]string{"team": "blue"})
	for _, request := range []mpsdclient.LeaseRequest{
		mpsdclient.LeaseOfThreadsAsLeaseRequest(threads),
		mpsdclient.LeaseOfThreadsAsLeaseRequest(inBytes),
		mpsdclient.LeaseOfFractionAsLeaseRequest(fraction),
	} {
		created, answer, err := api.LeasesAPI.CreateLease(ctx).LeaseRequest(request).Execute()
		lease := must(created, answer, err)
		fmt.Println("granted", lease.State, lease.GetActiveThreadPercentage(), lease.GetPinnedDeviceMemLimit())
		if granted := lease.GetGranted(); granted.IsZero() {
			fmt.Println("no time")
		}
		listed, answer, err := api.LeasesAPI.ListLeases(ctx).Execute()
		found := false
		for _, each := range must(listed, answer, err).Leases {
			found = found || each.Id == lease.Id
		}
		fmt.Println("listed", found)
		verified, answer, err := api.LeasesAPI.VerifyLease(ctx, lease.Id).Execute()
		fmt.Println("verdict", must(verified, answer, err).Verdict)
		renewed, answer, err := api.LeasesAPI.RenewLease(ctx, lease.Id).RenewRequest(*mpsdclient.NewRenewRequest(600)).Execute()
		fmt.Println("renewed", must(renewed, answer, err).Expires.IsSet())
		answer, err = api.LeasesAPI.ReleaseLease(ctx, lease.Id).Execute()
		must(0, answer, err)
	}

	huge := "999TiB"
	tooMuch := mpsdclient.NewLeaseOfThreads(1, mpsdclient.LeaseOfThreadsMemory{String: &huge})
	_, _, err = api.LeasesAPI.CreateLease(ctx).LeaseRequest(mpsdclient.LeaseOfThreadsAsLeaseRequest(tooMuch)).Execute()
	if failed, ok := err.(*mpsdclient.GenericOpenAPIError); ok {
		problem := failed.Model().(mpsdclient.Problem)
		fmt.Println("refused", problem.Status, problem.Code)
	}

	held, answer, err := api.DaemonsAPI.HoldDaemon(ctx, "gpu1").Execute()
	fmt.Println("held", must(held, answer, err).Verb, held.State)

	stream, err := configuration.HTTPClient.Get("http://mpsd/v1/events?after=latest&follow=true&heartbeat=1")
	must(0, stream, err)
	drained, answer, err := api.DaemonsAPI.DrainDaemon(ctx, "gpu1").Execute() // the body is optional
	must(drained, answer, err)
	for lines := bufio.NewScanner(stream.Body); lines.Scan(); {
		var event mpsdclient.Event
		must(0, stream, json.Unmarshal(lines.Bytes(), &event))
		if event.At.IsZero() {
			fmt.Println("no time")
		}
		fmt.Println("event", event.Event)
		if event.Event == "heartbeat" {
			break
		}
	}
	text, answer, err := api.EventsAPI.ReadEvents(ctx).Execute()
	fmt.Println("kept", strings.Count(must(text, answer, err), "\n") > 0)
}
